"""What the tools refuse: one message, exit code 2, nothing written. Rows of refusals.yaml."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster_tables import devices, table_1, table_2, write_tutorial_table
from tools import launch

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "PYTHON": sys.executable,
    "ROOT": str(ROOT),
    "TRAIN": "none CONFIG [0,2] train train.global_batch_size=null",
    "CONFIG": str(ROOT / "configs/gpt2/run_gpt2_tiny.yaml"),
    "OF_32": str(ROOT / "configs/gpt2/run_gpt2_13b.yaml"),
}


def rows() -> Iterator[Any]:
    table = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
    for tool, listed in table.items():
        for words, *said in listed:
            yield pytest.param(tool, words, said, id=f"{tool.split()[0]}: {words[:60]}")


def filled(text: str) -> str:
    for name, value in WORDS.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


def of_server(number: int, count: int = 2, **more: Any) -> dict[str, Any]:
    """A rank table of one server."""
    own = devices([f"192.168.{number}.{n + 1}" for n in range(count)], first_rank=0)
    return table_1((f"10.0.0.{number}", own)) | more


def tables() -> dict[str, Any]:
    newer, address, loopback = of_server(3, version="1.2"), of_server(3), of_server(3)
    for device in newer["server_list"][0]["device"]:
        device["super_device_id"] = device["device_id"]
    names = [{"server_id": "10.0.0.3"}]
    newer["super_pod_list"] = [{"super_pod_id": "7", "server_list": names}]
    address["server_list"][0]["device"][1]["device_ip"] = "192.168.1.1"
    loopback["server_list"][0]["server_id"] = "127.0.1.1"
    own = [devices([f"192.168.{n}.1"], first_rank=n) for n in range(2)]
    return {
        "a": of_server(1), "b": of_server(2), "same_server": of_server(1), "newer": newer,
        "same_address": address, "loopback": loopback, "larger": of_server(3, 4),
        "hccl_1s_2p": of_server(1), "v2": table_2(), "initializing": {"status": "initializing"},
        "two_loopback": table_1(("127.0.1.1", own[0]), ("10.0.0.1", own[1])),
    }  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files of the rows; no rank would be started."""
    files = {f"{name}.json": json.dumps(table) for name, table in tables().items()}
    files["hccn.conf"] = "".join(f"address_{n}=192.168.1.{n + 1}\n" for n in range(16))
    files["twice.conf"] = "address_0=10.1.1.1\naddress_1=10.1.1.1\n"
    files |= {"a.txt": "text", "bad.jsonl": '{"text": "a"}\n{"body": "b"}\n'}
    for name, step in (("run", 1), ("later", 9)):
        (tmp_path / name).mkdir()
        files[f"{name}/metrics.jsonl"] = (
            f'{{"step": {step}, "loss": 1.0, "tokens_per_second": 5.0, "sample_hash": "h"}}\n'
        )
        files[f"{name}/config.yaml"] = "backend: torch\noutput_dir: x\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    write_tutorial_table(tmp_path / "four.json")
    monkeypatch.setattr("common.launcher.launch.run_attempts", lambda *_, **__: pytest.fail("ranks started"))
    monkeypatch.setattr(launch, "check_before_ranks", lambda mode, config: None)
    for name in ("DRY_RUN", "DETACH", "RANK_SIZE", "RANK_TABLE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("tool", "words", "said"), [*rows()])
def test_refused(tool, words, said, here, monkeypatch, capsys, request) -> None:
    if "--seq-length 9" in words:  # as MindSpore's writer would need it
        pytest.importorskip("mindspore", reason="MindSpore is not installed")
    if "VOCABULARY" in tool:
        vocab, merges = request.getfixturevalue("gpt2_vocab_files")
        tool = tool.replace("VOCABULARY", f"--vocab-file {vocab} --merge-file {merges}")
    name, *given = shlex.split(filled(filled(f"{tool} {words}")))
    before = files_of(here)
    for variable in [word for word in given if re.match("[A-Z_]+=", word)]:
        monkeypatch.setenv(*variable.split("="))
        given.remove(variable)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *given])
    capsys.readouterr()
    try:
        code: object = importlib.import_module(name if name == "run_gpt2" else f"tools.{name}").main()
    except SystemExit as stop:  # by argparse
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("error: ") == 1, error
    assert [text for text in said if filled(filled(text)) not in error] == [], error
    assert files_of(here) == before
