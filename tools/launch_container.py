"""Run a command of the project in a container, with its sources, data and accelerators.

OneFlow-Benchmark has a tool of this name; its options are understood.

    python tools/launch_container.py --image gpt2-toolkit:cpu --cmd "bash scripts/quickstart.sh"
    python tools/launch_container.py --image gpt2-toolkit:cuda --devices nvidia \\
        --extra-mount /data --cmd "python run_gpt2.py ..."
    python tools/launch_container.py --image gpt2-toolkit:cann --devices ascend --dry-run

The images are made by docker build -f containers/KIND.Dockerfile -t gpt2-toolkit:KIND . (cpu, cuda,
cann). Exit code: that of docker; 2 for wrong arguments, and where docker is not installed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import ConfigError, GPT2Error, report

ASCEND_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
ASCEND_MOUNTS = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
"""Read-only paths of the host's driver. Source: Ascend Docker Runtime's guide, manual mounts."""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        command = docker_command(args)
        if args.dry_run:
            print(shlex.join(command))
            return 0
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"{command[0]} is not installed; install it, or see the command with --dry-run"
            )
    except GPT2Error as error:
        return report(error)
    # the words of the command line, no shell
    return subprocess.run(command, check=False).returncode  # noqa: S603


def docker_command(args: argparse.Namespace) -> list[str]:
    """Return the words of ``docker run``. Raises ConfigError for a folder that is not there, or no
    Ascend of this host.
    """
    source = args.src.resolve()
    mounts = [(source, source, "")]
    for text in args.extra_mount:
        host, _, inside = text.partition(":")
        path = Path(host).resolve()
        if not path.exists():
            raise ConfigError(
                f"--extra-mount {text}: {path} does not exist; make it, or leave the mount out"
            )
        mounts.append((path, Path(inside or path), ""))
    if args.wheel is not None:
        if not args.wheel.is_file():
            raise ConfigError(f"--wheel {args.wheel}: no such file; check the path")
        mounts.append((args.wheel.resolve().parent, args.wheel.resolve().parent, ":ro"))
    if not source.is_dir():
        raise ConfigError(f"--src {args.src}: is not a folder; give that of the project")
    words = [
        args.program,
        "run",
        "--rm",
        "--network",
        "host",
        "--shm-size",
        args.shm_size,
        "--ulimit",
        "memlock=-1",
    ]
    words += [] if args.no_interactive else ["-it"]
    words += _devices(args.devices, mounts)
    for name in ("http_proxy", "https_proxy") if args.proxy else ():
        words += ["-e", f"{name}={args.proxy}"]
    for host, inside, option in mounts:
        words += ["-v", f"{host}:{inside}{option}"]
    install = f"pip install {shlex.quote(str(args.wheel.resolve()))} && " if args.wheel else ""
    return [*words, "-w", str(source), args.image, "bash", "-c", install + args.cmd]


def _devices(kind: str, mounts: list[tuple[Path, Path, str]]) -> list[str]:
    """Return the words that give the container the host's accelerators; an Ascend's driver is added
    to ``mounts``.
    """
    if kind == "none":
        return []
    if kind == "nvidia":
        return ["--gpus", "all", "--ipc", "host", "--cap-add", "SYS_PTRACE"]
    cards = sorted(
        (path for path in Path("/dev").glob("davinci[0-9]*")), key=lambda path: int(path.name[7:])
    )
    if not cards:
        raise ConfigError(
            "--devices ascend: this host has no /dev/davinci0; install the driver, or choose"
            " --devices none"
        )
    mounts.extend((Path(path), Path(path), ":ro") for path in ASCEND_MOUNTS if Path(path).exists())
    return [word for device in (*map(str, cards), *ASCEND_DEVICES) for word in ("--device", device)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", required=True, metavar="NAME", help="image of the container")
    parser.add_argument(
        "--cmd",
        default="bash",
        metavar="TEXT",
        help="command that bash runs inside (default: a shell)",
    )
    parser.add_argument(
        "--src",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="folder to mount under its own path; --cmd starts there (default: the project)",
    )
    parser.add_argument(
        "--devices",
        choices=("none", "nvidia", "ascend"),
        default="none",
        help="accelerators to pass on (default: none)",
    )
    parser.add_argument(
        "--extra-mount",
        action="append",
        default=[],
        metavar="HOST[:INSIDE]",
        help="another folder to mount; may be repeated",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="a package that is installed in the container first",
    )
    # OneFlow's images hold several Pythons, ours hold one
    parser.add_argument("--py", help=argparse.SUPPRESS)
    parser.add_argument(
        "--shm-size",
        default="8g",
        metavar="SIZE",
        help="shared memory, for the ranks of a host (default: 8g)",
    )
    parser.add_argument("--proxy", metavar="URL", help="proxy for http and https")
    parser.add_argument(
        "--no-interactive", action="store_true", help="run without a terminal, for jobs"
    )
    parser.add_argument(
        "--program",
        default="docker",
        metavar="NAME",
        help="docker, podman or nerdctl (default: docker)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command, and start nothing"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
