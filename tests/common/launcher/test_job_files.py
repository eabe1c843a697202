"""Job files against the published definitions of their kinds, and values that Kubernetes refuses.

``data/job_schemas.json`` holds the fields of the custom resource definitions that it names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.launcher.job_files import quoted
from tools.job_files import main

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = json.loads((Path(__file__).parent / "data" / "job_schemas.json").read_text())["schemas"]
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
NAMES = ("--name", "gpt2", "--image", "registry.example/gpt2:1")
TINY = (
    *("--config", str(ROOT / "configs/gpt2/run_gpt2_tiny.yaml"), "--nodes", "2", "--devices", "2"),
    "train.micro_batch_size=2",
)


RULES: dict[str, Callable[[Any, Any], object]] = {
    "enum": lambda value, allowed: value in allowed,
    "pattern": lambda value, pattern: re.search(pattern, value),
    "maxLength": lambda value, most: len(value) <= most,
    "minimum": lambda value, least: value >= least,
    "minItems": lambda value, least: len(value) >= least,
}


def problems(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return the offences of a value, with their places; unknown fields are some, too."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(type(value) is TYPES[kind] for kind in kinds):
        return [f"{place}: {value!r} is not of {kinds}"]
    broken = [rule for rule in RULES if rule in schema and not RULES[rule](value, schema[rule])]
    found = [f"{place}: {value!r} breaks {rule} {schema[rule]}" for rule in broken]
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += problems(item, schema["items"], f"{place}[{number}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{place}: {key} is missing" for key in {*schema.get("required", [])} - {*value}]
        for key, item in value.items():
            inside = known.get(key, schema.get("additionalProperties"))
            found += problems(item, inside, f"{place}.{key}") if inside else [f"{place}: no {key}"]
    return found


def written(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(list(words)) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    for document in documents:
        assert problems(document, SCHEMAS[document["kind"]]) == []
    return documents


MORE = (
    *("--namespace", "vcjob", "--queue", "team-a", "--restarts", "0", "--host_network"),
    *("--cpu", "64", "--memory", "512Gi", "--shared_memory", "64Gi", "--workdir", "/code"),
    *("--mount", "my.claim:/code", "--mount", "/data/texts:/data", "--env", "NCCL_DEBUG=INFO"),
    *("--env", "EMPTY=", "--env", "NUMBER=1e3", "--env", "WORD=no", "--env", 'QUOTES="\\n: $(X)'),
    *("--node_label", "host-arch=huawei-arm", "--node_label", "example.com/a_b=1"),
    *("output_dir=/data/out", "train.max_steps=3", "predict.prompt=$(HOME) {a: b} 你好"),
)


@pytest.mark.parametrize("more", [(), MORE])
@pytest.mark.parametrize("nodes", ["1", "2", "100"])
@pytest.mark.parametrize("kind", ["volcano", "pytorchjob"])
def test_jobs_fulfil_the_definitions(
    capsys: pytest.CaptureFixture[str], kind: str, nodes: str, more: tuple[str, ...]
) -> None:
    batch = f"train.global_batch_size={int(nodes) * 16}"
    documents = written(capsys, kind, *NAMES, *TINY, "--nodes", nodes, batch, *more)
    assert len({document["metadata"]["name"] for document in documents}) == len(documents)


def test_fields_of_a_volcano_job(capsys: pytest.CaptureFixture[str]) -> None:
    table = "/user/config/jobstart_hccl.json"
    config_map, job = written(capsys, "volcano", *NAMES, *TINY, *MORE, "--rank_table", table)
    assert config_map["metadata"]["name"] == "rings-config-gpt2"
    assert config_map["metadata"]["labels"] == {"ring-controller.atlas": "ascend-910"}
    assert json.loads(config_map["data"]["hccl.json"]) == {"status": "initializing"}
    assert config_map["metadata"]["namespace"] == job["metadata"]["namespace"] == "vcjob"
    assert job["metadata"]["labels"]["fault-scheduling"] == "grace"
    assert job["spec"]["minAvailable"] == 2
    (task,) = job["spec"]["tasks"]
    pod, labels = task["template"]["spec"], task["template"]["metadata"]["labels"]
    assert task["replicas"] == 2 and labels["ring-controller.atlas"] == "ascend-910"
    (container,) = pod["containers"]
    assert container["command"] == [
        *("bash", "scripts/run_distribute.sh", table, "configs/gpt2/run_gpt2_tiny.yaml", "[0,2)"),
        *("train", "train.micro_batch_size=2", "output_dir=/data/out", "train.max_steps=3"),
        "predict.prompt=$$(HOME) {a: b} 你好",  # Kubernetes turns $$ into $
    ]
    variables = {each["name"]: each for each in container["env"]}
    devices = variables["ASCEND_VISIBLE_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert devices == "metadata.annotations['huawei.com/Ascend910']"
    assert variables["XDL_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    assert variables["RANK_TABLE_FILE"]["value"] == table
    values = [variables[name]["value"] for name in ("EMPTY", "NUMBER", "WORD", "QUOTES")]
    assert values == ["", "1e3", "no", '"\\n: $$(X)']
    limits = {"cpu": "64", "memory": "512Gi", "huawei.com/Ascend910": "2"}
    assert container["resources"]["limits"] == limits
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    assert volumes[mounts["/user/config"]]["configMap"] == {
        "name": "rings-config-gpt2",
        "items": [{"key": "hccl.json", "path": "jobstart_hccl.json"}],
    }
    assert volumes[mounts["/code"]] == {"persistentVolumeClaim": {"claimName": "my.claim"}}
    assert volumes[mounts["/data"]] == {"hostPath": {"path": "/data/texts"}}


def test_failed_pods_are_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the scheduler of MindCluster, or Volcano, or nobody."""
    for words, labels, action in (
        ((), {"fault-scheduling": "grace", "fault-retry-times": "3"}, "Ignore"),
        (("--fault_scheduling", "off"), {"fault-scheduling": "off"}, "RestartJob"),
        (("--restarts", "0"), {"fault-scheduling": "grace"}, "AbortJob"),
    ):
        job = written(capsys, "volcano", *NAMES, *TINY, *words)[1]
        assert job["metadata"]["labels"] == {"ring-controller.atlas": "ascend-910", **labels}
        assert {"event": "PodFailed", "action": action} in job["spec"]["policies"]


def test_fields_of_a_pytorch_job(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = written(capsys, "pytorchjob", *NAMES, *TINY, "--resource", "none")
    spec = job["spec"]
    assert spec["nprocPerNode"] == "2" and spec["runPolicy"]["backoffLimit"] == 3
    counts = {role: each["replicas"] for role, each in spec["pytorchReplicaSpecs"].items()}
    assert counts == {"Master": 1, "Worker": 1}
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and "resources" not in container
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
    assert container["command"][1:3] == ["scripts/run_distribute.sh", "none"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "Gpt2"], "argument --name: 'Gpt2': expected a name of Kubernetes (DNS-1123)"),
        (["--name", "a" * 60], "expected at most 54 characters, with -worker-1 behind it"),
        (["--image", "a b\n"], "--image"),
        (["--memory", "12GB"], "argument --memory: '12GB': expected a quantity"),
        (["--workdir", "code"], "argument --workdir: 'code': expected an absolute path"),
        (["--mount", "Claim:/a"], "expected SOURCE:PATH, a claim (DNS-1123)"),
        (["--mount", "/a/..:/b"], "and an absolute path without .. and colons"),
        (["--mount", "a:/a", "--mount", "b:/a"], "--mount: /a is there twice"),
        (["--mount", "a:/user/serverid/devindex/config"], "is there twice"),
        (["--env", "A B=secret"], "argument --env: 'A B': expected NAME=VALUE"),
        (["--env", "A=1", "--env", "A=2"], "--env: A is there twice"),
        (["--node_label", "a=b c"], "argument --node_label: 'a=b c'"),
        (["--chip", "gpu"], "argument --chip: 'gpu': expected ascend-910"),
        (["--resource", "nvidia.com/gpu"], "gets its rank table from Ascend's device plugin"),
        (["--devices", "5"], "global_batch_size"),
        (["train.max_step=1"], "max_steps"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["predict.prompt=\udce4"], "expected text in UTF-8"),
    ],
)
def test_values_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str) -> None:
    output = tmp_path / "job.yaml"
    try:
        code: object = main(["volcano", *NAMES, *TINY, "--output", str(output), *words])
    except SystemExit as end:  # a form that the parser refuses
        code = end.code
    line, *more = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and said in line and len(more) == ("argument" in line)
    assert not output.exists()


def test_a_file_is_written_whole_and_a_lost_output_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    assert main(["volcano", *NAMES, *TINY, "--output", str(path)]) == 0
    told = capsys.readouterr().err
    assert f"wrote {path}: kubectl apply -f {path}" in told
    assert "is not below a --mount" in told
    assert [each["kind"] for each in yaml.safe_load_all(path.read_text())] == ["ConfigMap", "Job"]
    assert main(["volcano", *NAMES, *TINY, "--mount", "code:/job/code"]) == 0
    assert capsys.readouterr().err == ""


def test_strings_stay_strings_for_every_parser() -> None:
    plain = ["1e3", "0x1f", "no", "Y", "1:30", "~", "", "null"]
    for word in (*plain, "a: b", "- a", "#", "é\t\u2028", "a\nb"):
        text = quoted(word)
        assert yaml.safe_load(f"{text}: [{text}]") == {word: [word]}
        assert re.fullmatch(r'".*"|[A-Za-z/][\w./-]*', text)
