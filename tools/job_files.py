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

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common import whole_numbers
from common.command_line import RUN_MODES
from common.errors import ConfigError, GPT2Error, report
from common.files import atomic_write
from common.launcher.job_files import (
    ASCEND,
    RANK_TABLE,
    JobRequest,
    job_yaml,
    pytorch_job,
    volcano_job,
)
from common.resolve.derive import resolve_mode
from common.run_config import load_config

GPU = "nvidia.com/gpu"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    try:
        job = _request(arguments)
        make = volcano_job if arguments.kind == "volcano" else pytorch_job
        text = f"# kubectl apply -f FILE; written by tools/job_files.py\n{job_yaml(make(job))}"
        output_dir = _check_config(arguments, job)
        if arguments.output is None:
            print(text, end="")
        else:
            with atomic_write(arguments.output, "w") as file:
                file.write(text)
            print(f"wrote {arguments.output}: kubectl apply -f {arguments.output}", file=sys.stderr)
    except GPT2Error as error:
        return report(error)
    if not any(output_dir.is_relative_to(path) for path in job.kept):
        print(
            f"warning: output_dir={output_dir} is not below a --mount, so checkpoints end with the"
            " pod and nodes do not share it; set output_dir=PATH below one",
            file=sys.stderr,
        )
    return 0


def _check_config(arguments: argparse.Namespace, job: JobRequest) -> PurePosixPath:
    """Return the output folder in the pod. Raises ConfigError for a layout that does not fit."""
    config = load_config(arguments.config, list(job.words))
    resolve_mode(config, job.mode, world_size=job.nodes * job.devices)
    return PurePosixPath(job.workdir) / str(config.output_dir)


def _request(arguments: argparse.Namespace) -> JobRequest:
    resource = arguments.resource or (ASCEND if arguments.kind == "volcano" else GPU)
    path = arguments.config.resolve()
    in_pod = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return JobRequest(
        name=arguments.name,
        image=arguments.image,
        config=str(in_pod),
        nodes=arguments.nodes,
        devices=arguments.devices,
        mode=arguments.run_mode,
        words=tuple(arguments.words),
        namespace=arguments.namespace,
        queue=arguments.queue,
        workdir=arguments.workdir,
        resource=None if resource == "none" else resource,
        cpu=arguments.cpu,
        memory=arguments.memory,
        shared_memory=arguments.shared_memory,
        mounts=tuple(_pairs("--mount", arguments.mount, ":", "SOURCE:PATH")),
        variables=dict(_pairs("--env", arguments.env, "=", "NAME=VALUE")),
        node_labels=dict(_pairs("--node_label", arguments.node_label, "=", "KEY=VALUE")),
        host_network=arguments.host_network,
        rank_table=arguments.rank_table,
        chip=arguments.chip,
        fault_scheduling=arguments.fault_scheduling,
        restarts=arguments.restarts,
    )


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=("volcano", "pytorchjob"), help="kind of the job")
    group = parser.add_argument_group("run")
    group.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML of the run")
    group.add_argument(
        "--run_mode",
        choices=RUN_MODES,
        default="train",
        help="what run_gpt2.py does (default: train)",
    )
    group.add_argument(
        "--nodes", required=True, type=whole_numbers.argument(1, 9999), metavar="N", help="pods"
    )
    group.add_argument(
        "--devices",
        required=True,
        type=whole_numbers.argument(1, 64),
        metavar="N",
        help="devices of each node, and ranks",
    )
    group.add_argument("words", nargs="*", metavar="section.key=value", help=argparse.SUPPRESS)
    group = parser.add_argument_group("job")
    group.add_argument("--name", required=True, metavar="NAME", help="name of the job")
    group.add_argument("--image", required=True, metavar="NAME", help="image of the pods")
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )
    group.add_argument(
        "--namespace", default="default", metavar="NAME", help="namespace (default: default)"
    )
    group.add_argument(
        "--queue", default="default", metavar="NAME", help="queue of Volcano (default: default)"
    )
    group.add_argument(
        "--restarts",
        type=whole_numbers.argument(0, 1000),
        default=3,
        metavar="N",
        help="attempts after a failure; each resumes from the last checkpoint (default: 3)",
    )
    group = parser.add_argument_group("pods")
    group.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="SOURCE:PATH",
        help="persistent volume claim, or folder of the node where SOURCE begins with /, and its"
        " path in the pod; may be repeated",
    )
    group.add_argument(
        "--workdir",
        default="/job/code",
        metavar="PATH",
        help="folder of this project in the pod (default: /job/code)",
    )
    group.add_argument(
        "--resource",
        metavar="NAME",
        help=f"name of a device in Kubernetes, or none (default: {ASCEND}, {GPU})",
    )
    group.add_argument("--cpu", metavar="N", help="cores of a pod, such as 64")
    group.add_argument("--memory", metavar="SIZE", help="memory of a pod, such as 512Gi")
    group.add_argument(
        "--shared_memory",
        default="16Gi",
        metavar="SIZE",
        help="size of /dev/shm (default: 16Gi)",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the pods; may be repeated",
    )
    group.add_argument(
        "--node_label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label that nodes must have, such as host-arch=huawei-arm; may be repeated",
    )
    group.add_argument(
        "--host_network",
        action="store_true",
        help="give pods the network of their nodes; needed where nodes cannot reach pods",
    )
    group = parser.add_argument_group("volcano")
    group.add_argument(
        "--chip",
        default="ascend-910",
        metavar="NAME",
        help="label ring-controller.atlas; ascend-910b for Atlas A2 (default: ascend-910)",
    )
    group.add_argument(
        "--rank_table",
        default=RANK_TABLE,
        metavar="PATH",
        help=f"path at which pods see the rank table (default: {RANK_TABLE})",
    )
    group.add_argument(
        "--fault_scheduling",
        choices=("grace", "force", "off"),
        default="grace",
        help="how MindCluster ends a job on a faulty device before it starts it elsewhere (default:"
        " grace)",
    )
    return parser


if __name__ == "__main__":
    run_script(main)
