"""Write the file of a Kubernetes job that trains on several nodes.

    python tools/job_files.py volcano --name gpt2-13b --image registry.example/gpt2:cann \\
            --nodes 4 --devices 8 --config configs/gpt2/run_gpt2_13b_dp4_mp8.yaml \\
            --mount gpt2-code:/job/code --mount gpt2-data:/job/data --output gpt2-13b.yaml
        a Volcano job on Ascend 910, with the ConfigMap into which MindCluster writes the rank table
    python tools/job_files.py pytorchjob --name gpt2-124m --image registry.example/gpt2:cuda \\
            --nodes 2 --devices 4 --config configs/gpt2/run_gpt2_124m.yaml \\
            --mount gpt2-code:/job/code output_dir=/job/code/output/pods
        a PyTorchJob of Kubeflow's training operator, on GPUs or other devices

Each node runs scripts/run_distribute.sh in a pod, which finds out which node it is. The
configuration is checked for these nodes first. section.key=value words at the end go to every rank.
Submit the file by kubectl apply -f FILE.

Exit codes: 0 written, 1 the file could not be written, 2 an option or the configuration is at
fault.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.program import start

    start(__file__)

from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Literal

from common import whole_numbers
from common.command_line import RUN_MODES
from common.config.load import load_config
from common.errors import ConfigError
from common.files import atomic_write
from common.flags import flag
from common.inference.from_checkpoint import accept_models_of_checkpoints
from common.launcher.job_files import (
    ASCEND,
    RANK_TABLE,
    JobRequest,
    job_yaml,
    pytorch_job,
    volcano_job,
)
from common.paths import ROOT
from common.program import command
from common.resolve.derive import resolve_mode
from common.systems.config import accept_foreign_configs

GPU = "nvidia.com/gpu"


@dataclass(kw_only=True)
class Request:
    kind: Literal["volcano", "pytorchjob"] = flag("kind of the job", required=True, positional=True)
    config: Path = flag("FILE: YAML of the run", required=True, group="run")
    run_mode: str = flag("what run_gpt2.py does", default="train", choices=RUN_MODES)
    nodes: int = flag("N: pods", required=True, type=whole_numbers.argument(1, 9999))
    devices: int = flag(
        "N: devices of each node, and ranks", required=True, type=whole_numbers.argument(1, 64)
    )
    words: tuple[str, ...] = flag(SUPPRESS, positional=True, nargs="*", metavar="section.key=value")
    name: str = flag("NAME: name of the job", required=True, group="job")
    image: str = flag("NAME: image of the pods", required=True)
    output: Path | None = flag("FILE: file to write (default: standard output)")
    namespace: str = flag("NAME: namespace", default="default")
    queue: str = flag("NAME: queue of Volcano", default="default")
    restarts: int = flag(
        "N: attempts after a failure; each resumes from the last checkpoint",
        default=3,
        type=whole_numbers.argument(0, 1000),
    )
    mount: tuple[str, ...] = flag(
        "SOURCE:PATH: persistent volume claim, or folder of the node where SOURCE begins with /,"
        " and its path in the pod; may be repeated",
        group="pods",
    )
    workdir: str = flag("PATH: folder of this project in the pod", default="/job/code")
    resource: str | None = flag(
        f"NAME: name of a device in Kubernetes, or none (default: {ASCEND}, {GPU})"
    )
    cpu: str | None = flag("N: cores of a pod, such as 64")
    memory: str | None = flag("SIZE: memory of a pod, such as 512Gi")
    shared_memory: str = flag("SIZE: size of /dev/shm", default="16Gi")
    env: tuple[str, ...] = flag("NAME=VALUE: variable of the pods; may be repeated")
    node_label: tuple[str, ...] = flag(
        "KEY=VALUE: label that nodes must have, such as host-arch=huawei-arm; may be repeated"
    )
    host_network: bool = flag(
        "give pods the network of their nodes; needed where nodes cannot reach pods"
    )
    chip: str = flag(
        "NAME: label ring-controller.atlas; ascend-910b for Atlas A2",
        default="ascend-910",
        group="volcano",
    )
    rank_table: str = flag("PATH: path at which pods see the rank table", default=RANK_TABLE)
    fault_scheduling: Literal["grace", "force", "off"] = flag(
        "how MindCluster ends a job on a faulty device before it starts it elsewhere",
        default="grace",
    )


@command(Request)
def main(request: Request) -> None:
    job = _job(request)
    make = volcano_job if request.kind == "volcano" else pytorch_job
    text = f"# kubectl apply -f FILE; written by tools/job_files.py\n{job_yaml(make(job))}"
    output_dir = _check_config(request, job)
    if request.output is None:
        print(text, end="")
    else:
        with atomic_write(request.output, "w") as file:
            file.write(text)
        print(f"wrote {request.output}: kubectl apply -f {request.output}", file=sys.stderr)
    if not any(output_dir.is_relative_to(path) for path in job.kept):
        print(
            f"warning: output_dir={output_dir} is not below a --mount, so checkpoints end with the"
            " pod and nodes do not share it; set output_dir=PATH below one",
            file=sys.stderr,
        )


def _check_config(arguments: Request, job: JobRequest) -> PurePosixPath:
    """Return the output folder in the pod. Raises ConfigError for a layout that does not fit."""
    accept_foreign_configs()
    accept_models_of_checkpoints()
    config = load_config(arguments.config, list(job.words))
    resolve_mode(config, job.mode, world_size=job.nodes * job.devices)
    return PurePosixPath(job.workdir) / str(config.output_dir)


def _job(request: Request) -> JobRequest:
    resource = request.resource or (ASCEND if request.kind == "volcano" else GPU)
    path = request.config.resolve()
    in_pod = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    same = {each.name for each in fields(JobRequest)} & vars(request).keys()
    different = {
        "config": str(in_pod),
        "mode": request.run_mode,
        "resource": None if resource == "none" else resource,
        "mounts": tuple(_pairs("--mount", request.mount, ":", "SOURCE:PATH")),
        "variables": dict(_pairs("--env", request.env, "=", "NAME=VALUE")),
        "node_labels": dict(_pairs("--node_label", request.node_label, "=", "KEY=VALUE")),
    }
    return JobRequest(**{name: getattr(request, name) for name in same} | different)


def _pairs(
    option: str, words: Sequence[str], separator: str, expected: str
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for word in words:
        name, mark, value = word.partition(separator)
        if not mark or not name:
            raise ConfigError(f"{option} {whole_numbers.shortened(word)!r}: expected {expected}")
        if name in dict(found) and separator == "=":
            raise ConfigError(f"{option} {name}: is given twice; give it once")
        found.append((name, value))
    return found
