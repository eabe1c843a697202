"""Jobs of Kubernetes that run scripts/run_distribute.sh in a pod per node: a Volcano job on Ascend
NPUs, with the ConfigMap of its rank table, and a PyTorchJob. Their texts are in ``templates/``.

Sources: the custom resource definitions of volcano-sh/volcano (config/crd/volcano/bases) and of
kubeflow/training-operator (manifests/base/crds); MindCluster's user guide for labels, annotations
and the ConfigMap of the rank table.
"""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import jinja2

from common.command_line import RUN_MODES
from common.errors import ConfigError
from common.flags import at_least, flag
from common.paths import ROOT
from common.processes.addresses import DEFAULT_PORT

RANK_TABLE = "/user/serverid/devindex/config/hccl.json"
"""Place of the rank table in MindCluster's containers."""
ASCEND, GPU = "huawei.com/Ascend910", "nvidia.com/gpu"
_PATH, _ABSOLUTE = r"(?!.*/\.\.([/:]|$))/[^:\x00-\x1f\x7f]*", "an absolute path without .. and colons"
_CLAIM = r"(?=[^:]{1,253}:)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_QUALIFIED = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_IP": "status.podIP",
    "XDL_IP": "status.hostIP",
}
_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_BREAKS = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
"""Characters that YAML takes for line ends or refuses."""
_WORDS = re.compile("y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)


def _of_form(pattern: str, expected: str, *, secret: bool = False) -> Callable[[str], Any]:
    """Return a ``type`` for argparse: text that a pattern matches, or the pair of its groups ``key`` and ``value``.

    secret: leave the value out of the message.
    """

    def parse(text: str) -> Any:
        found = re.fullmatch(pattern, text)
        if found is None:
            said = text.partition("=")[0] if secret else text
            raise ArgumentTypeError(f"{said!r}: expected {expected}")
        return tuple(found.groupdict().values()) or text

    return parse


_LABEL = _of_form(
    r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
    "a name of Kubernetes (DNS-1123): at most 63 lower-case letters, digits and -, with a letter or digit at both ends",
)
_QUANTITY = _of_form(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?", "a quantity such as 64, 500m or 128Gi")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Options of tools/job_files.py. Raises ConfigError for a value that Kubernetes refuses."""

    kind: Literal["volcano", "pytorchjob"] = flag("kind of the job", required=True, positional=True)
    config: Path = flag("FILE: YAML of the run", required=True, group="run")
    mode: str = flag("what run_gpt2.py does", "--run_mode", default="train", choices=RUN_MODES)
    nodes: int = flag("N: pods", required=True, type=at_least(1, 9999))
    devices: int = flag("N: devices of each node, and ranks", required=True, type=at_least(1, 64))
    words: tuple[str, ...] = flag(SUPPRESS, default=(), positional=True, nargs="*", metavar="section.key=value")
    name: str = flag("NAME: name of the job", required=True, group="job", type=_LABEL)
    image: str = flag(
        "NAME: image of the pods", required=True, type=_of_form("[A-Za-z0-9][-A-Za-z0-9_./:@]*", "registry/name:tag")
    )
    output: Path | None = flag("FILE: file to write (default: standard output)")
    namespace: str = flag("NAME: namespace", default="default", type=_LABEL)
    queue: str = flag("NAME: queue of Volcano", default="default", type=_LABEL)
    restarts: int = flag(
        "N: attempts after a failure; each resumes from the last checkpoint", default=3, type=at_least(0, 1000)
    )
    mount: tuple[tuple[str, str], ...] = flag(
        "SOURCE:PATH: persistent volume claim, or folder of the node where SOURCE begins with /,"
        " and its path in the pod; may be repeated",
        default=(),
        group="pods",
        type=_of_form(
            f"(?P<key>{_CLAIM}|{_PATH}):(?P<value>{_PATH})",
            f"SOURCE:PATH, a claim (DNS-1123) or a folder, /..., and {_ABSOLUTE}",
        ),
    )
    workdir: str = flag("PATH: folder of this project in the pod", default="/job/code", type=_of_form(_PATH, _ABSOLUTE))
    resource: str | None = flag(
        f"NAME: name of a device in Kubernetes, or none (default: {ASCEND}, {GPU})",
        type=_of_form(_QUALIFIED, f"a resource such as {ASCEND}"),
    )
    cpu: str | None = flag("N: cores of a pod, such as 64", type=_QUANTITY)
    memory: str | None = flag("SIZE: memory of a pod, such as 512Gi", type=_QUANTITY)
    shared_memory: str = flag("SIZE: size of /dev/shm", default="16Gi", type=_QUANTITY)
    env: tuple[tuple[str, str], ...] = flag(
        "NAME=VALUE: variable of the pods; may be repeated",
        default=(),
        type=_of_form(
            "(?s)(?P<key>[A-Za-z_.-][A-Za-z0-9_.-]*)=(?P<value>.*)",
            "NAME=VALUE with the name of a variable",
            secret=True,
        ),
    )
    node_label: tuple[tuple[str, str], ...] = flag(
        "KEY=VALUE: label that nodes must have, such as host-arch=huawei-arm; may be repeated",
        default=(),
        type=_of_form(f"(?P<key>{_QUALIFIED})=(?P<value>{_LABEL_VALUE})", "KEY=VALUE, the key and value of a label"),
    )
    host_network: bool = flag(
        "give pods the network of their nodes; needed where nodes cannot reach pods", default=False
    )
    chip: str = flag(
        "NAME: label ring-controller.atlas; ascend-910b for Atlas A2",
        default="ascend-910",
        group="volcano",
        type=_of_form("ascend-[a-z0-9]+", "ascend-910 or ascend-910b"),
    )
    rank_table: str = flag(
        "PATH: path at which pods see the rank table", default=RANK_TABLE, type=_of_form(_PATH, _ABSOLUTE)
    )
    fault_scheduling: Literal["grace", "force", "off"] = flag(
        "how MindCluster ends a job on a faulty device before it starts it elsewhere", default="grace"
    )

    def __post_init__(self) -> None:
        last = f"-worker-{max(0, self.nodes - 1)}"  # behind the name in that of a pod
        if len(self.name + last) > 63:
            raise ConfigError(
                f"--name {self.name!r}: expected at most {63 - len(last)} characters, with {last} behind it"
            )
        taken = {"/dev/shm", str(PurePosixPath(self.rank_table).parent)}  # noqa: S108
        for option, names in (
            ("--mount", [*taken, *(place for _, place in self.mount)]),
            ("--env", [name for name, _ in self.env]),
            ("--node_label", [name for name, _ in self.node_label]),
        ):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{option}: {twice[0]} is there twice; name it once")


def job_yaml(job: JobRequest) -> str:
    """Return the YAML of the job. Raises ConfigError for a Volcano job without Ascend NPUs."""
    is_volcano = job.kind == "volcano"
    resource = job.resource or (ASCEND if is_volcano else GPU)
    if resource == "none":
        resource = ASCEND if is_volcano else ""
    if is_volcano and not resource.startswith("huawei.com/"):
        raise ConfigError(
            f"--resource {resource}: a Volcano job gets its rank table from Ascend's device"
            f" plugin, expected {ASCEND} or its like; write a PyTorchJob for other devices"
        )
    table = job.rank_table if is_volcano else "none"
    config = job.config.resolve()
    amounts = {"cpu": job.cpu, "memory": job.memory, resource: str(job.devices)}
    templates = jinja2.Environment(  # noqa: S701 - YAML, no HTML
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    # in a literal text Kubernetes finds no $(VARIABLE) to replace
    templates.filters["literal"] = lambda text: text.replace("$", "$$") if "$(" in text else text
    templates.filters["q"] = quoted
    values = {
        "job": job,
        "kind": job.kind,
        "resource": resource,
        "table": PurePosixPath(job.rank_table),
        "command": [
            *(
                "bash",
                "scripts/run_distribute.sh",
                table,
                str(config.relative_to(ROOT) if config.is_relative_to(ROOT) else config),
            ),
            *(f"[0,{job.devices})", job.mode, *job.words),
        ],
        "amounts": {name: amount for name, amount in amounts.items() if name and amount},
        "pod_fields": _POD_FIELDS,
        "port": DEFAULT_PORT,
    }
    pod = templates.get_template("pod.yaml.j2").render(values).strip()
    text = templates.get_template(f"{job.kind}.yaml.j2").render(values, pod=pod)
    if text.encode(errors="replace").decode() != text:
        raise ConfigError("a word or a value of the job: expected text in UTF-8")
    return text


def quoted(text: str) -> str:
    """Return a YAML scalar that is this string for any parser: all but plain words are quoted."""
    if _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text):
        return text
    escape = json.dumps(text, ensure_ascii=False)
    return _BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", escape)
