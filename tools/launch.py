"""Start the ranks of this host and wait for them.

scripts/run_distribute.sh and scripts/run_standalone.sh call this program.

    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[0,8]' train
        the devices 0-7 of this machine
    bash scripts/run_distribute.sh RANK_TABLE CONFIG '[8,16]' train 32
        the ranks 8-15 of 32, on each machine its own
    bash scripts/run_distribute.sh none CONFIG '[0,4]' train
        no rank table: GPUs, or processes on CPU
    bash scripts/run_distribute.sh --devices 0,1,4 none CONFIG train
                only these devices
    bash scripts/run_distribute.sh --master 10.0.0.1:29500 --nnodes 2 none CONFIG '[0,4]' train
        the same on each of two machines, which agree on who is which
    bash scripts/run_standalone.sh CONFIG DEVICE_ID train
        one process

section.key=value words at the end go to every rank. What rank 0 writes is shown, unless --quiet is
given. DRY_RUN=1 before the command shows what each rank would get and starts nothing; DETACH=1
returns at once. Exit code 0: all ranks ended well; 2: bad arguments; else that of the first rank
that failed, 128+n: signal n.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from functools import cache

import run_gpt2
from common.backends import check_before_ranks
from common.command_line import RUN_MODES
from common.flags import parse
from common.launcher.host_list import run_over_ssh
from common.launcher.launch import start
from common.launcher.request import DistributeOptions, Options, parse_distribute, parse_standalone
from common.program import command
from common.run_config import read_config

_ABOUT_STANDALONE = """Start one process on one device and wait for it, from any folder.

    bash scripts/run_standalone.sh CONFIG DEVICE_ID train
        on device DEVICE_ID, counted from 0
    bash scripts/run_standalone.sh CONFIG 0 train train.max_steps=9
        any key of the configuration may follow

Its log is mf_standalone/mindformer.log in the run folder. DRY_RUN=1 before the command shows what
the process would get and starts nothing; DETACH=1 returns at once. Exit code 0: it ended well; 2:
bad arguments; else its own, 128+n: signal n.
"""


@command()
def main(words: list[str]) -> int:
    kind, *words = words or ["--help"]
    if kind in ("--help", "-h"):
        kind, words = "distribute", ["--help"]
    if kind == "over_ssh":  # this file again, once a host
        return run_over_ssh(*words)
    argv = (kind, *words)
    if kind == "standalone":
        options = parse(Options, words, _ABOUT_STANDALONE, prog="run_standalone.sh")
        request = parse_standalone(options, RUN_MODES, argv)
    else:
        several = parse(DistributeOptions, words, __doc__, prog="run_distribute.sh")
        request = parse_distribute(several, RUN_MODES, argv)
    read = cache(read_config)  # only once, and not where nothing is asked of it
    if request.mode == "plan" and kind == "standalone":  # needs no process of its own
        words = ["--config", str(request.config), "--run_mode", "plan", *request.overrides]
        return run_gpt2.main(words, file=read(request.config))
    return start(request, lambda words: read(request.config).open(words).config, check_before_ranks)
