"""Run a command of the project in a container, with its sources, data and accelerators.

OneFlow-Benchmark has a tool of this name; its options are understood.

    python tools/launch_container.py --image gpt2-toolkit:cpu --cmd "bash scripts/quickstart.sh"
    python tools/launch_container.py --image gpt2-toolkit:cuda --devices nvidia \\
        --extra-mount /data --cmd "python run_gpt2.py ..."
    python tools/launch_container.py --image gpt2-toolkit:cann --devices ascend --dry-run

The images are made by docker build -f containers/KIND.Dockerfile -t gpt2-toolkit:KIND . (cpu, cuda,
cann). Exit code: that of docker; 2 for wrong arguments, and where docker is not installed.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import shlex
import shutil
import subprocess
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.flags import flag
from common.paths import ROOT
from common.program import command

ASCEND_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
ASCEND_MOUNTS = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
"""Read-only paths of the host's driver. Source: Ascend Docker Runtime's guide, manual mounts."""


@dataclass(kw_only=True)
class Request:
    image: str = flag("NAME: image of the container", required=True)
    cmd: str = flag("TEXT: command that bash runs inside (default: a shell)", default="bash")
    src: Path = flag("DIR: folder to mount under its own path; --cmd starts there (default: the project)", default=ROOT)
    devices: Literal["none", "nvidia", "ascend"] = flag("accelerators to pass on", default="none")
    extra_mount: tuple[str, ...] = flag("HOST[:INSIDE]: another folder to mount; may be repeated")
    wheel: Path | None = flag("FILE: a package that is installed in the container first")
    py: str | None = flag(SUPPRESS)
    """OneFlow's images hold several Pythons, ours hold one."""
    shm_size: str = flag("SIZE: shared memory, for the ranks of a host", default="8g")
    proxy: str | None = flag("URL: proxy for http and https")
    no_interactive: bool = flag("run without a terminal, for jobs")
    program: str = flag("NAME: docker, podman or nerdctl", default="docker")
    dry_run: bool = flag("print the command, and start nothing")


@command(Request, dashes=True, allow_abbrev=True)
def main(args: Request) -> int:
    source = args.src.resolve()
    mounts = [(source, source, "")]
    for text in args.extra_mount:
        host, _, inside = text.partition(":")
        path = Path(host).resolve()
        if not path.exists():
            raise ConfigError(f"--extra-mount {text}: {path} does not exist; make it, or leave the mount out")
        mounts.append((path, Path(inside or path), ""))
    if args.wheel is not None:
        if not args.wheel.is_file():
            raise ConfigError(f"--wheel {args.wheel}: no such file; check the path")
        mounts.append((args.wheel.resolve().parent, args.wheel.resolve().parent, ":ro"))
    if not source.is_dir():
        raise ConfigError(f"--src {args.src}: is not a folder; give that of the project")
    words = [args.program, "run", "--rm", "--network", "host", "--shm-size", args.shm_size]
    words += ["--ulimit", "memlock=-1"]
    words += [] if args.no_interactive else ["-it"]
    words += _devices(args.devices, mounts)
    for name in ("http_proxy", "https_proxy") if args.proxy else ():
        words += ["-e", f"{name}={args.proxy}"]
    for outside, place, option in mounts:
        words += ["-v", f"{outside}:{place}{option}"]
    install = f"pip install {shlex.quote(str(args.wheel.resolve()))} && " if args.wheel else ""
    words += ["-w", str(source), args.image, "bash", "-c", install + args.cmd]
    if args.dry_run:
        print(shlex.join(words))
        return 0
    if shutil.which(args.program) is None:
        raise ConfigError(f"{args.program} is not installed; install it, or see the command with --dry-run")
    # the words of the command line, no shell
    return subprocess.run(words, check=False).returncode  # noqa: S603


def _devices(kind: str, mounts: list[tuple[Path, Path, str]]) -> list[str]:
    """Return the words that give the container the host's accelerators; an Ascend's driver is added to ``mounts``."""
    if kind == "none":
        return []
    if kind == "nvidia":
        return ["--gpus", "all", "--ipc", "host", "--cap-add", "SYS_PTRACE"]
    cards = sorted((path for path in Path("/dev").glob("davinci[0-9]*")), key=lambda path: int(path.name[7:]))
    if not cards:
        raise ConfigError(
            "--devices ascend: this host has no /dev/davinci0; install the driver, or choose --devices none"
        )
    mounts.extend((Path(path), Path(path), ":ro") for path in ASCEND_MOUNTS if Path(path).exists())
    return [word for device in (*map(str, cards), *ASCEND_DEVICES) for word in ("--device", device)]
