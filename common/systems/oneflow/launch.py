"""Launch of OneFlow's ``python -m oneflow_gpt.training``: one command on each node starts a rank on
each of its devices. The node finds its number by its address.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from common.cluster.environment import find_process
from common.errors import ConfigError
from common.whole_numbers import MOST_RANKS, argument


def start_nodes_devices(
    run: Callable[..., int], launch: Callable[[list[str]], int], flags: Sequence[str]
) -> Callable[..., int]:
    """Return the function to call for a training with these flags: ``run``, or a launch of several
    ranks.

    run: ``main`` of run_gpt2.py, for a single device or a rank that another launcher has started.
    launch: ``main`` of tools/launch.py. The function raises ConfigError.
    """

    def start(argv: list[str], *, program: str) -> int:
        if not {"--show_config", "--help", "-h"}.isdisjoint(argv):
            return run(argv, program=program)
        options = _options(flags, os.environ)
        if options is None:
            return run(argv, program=program)
        _, config, _, mode, *overrides = argv  # --config FILE --run_mode train KEY=VALUE ...
        return launch(["distribute", *options, "none", config, mode, *overrides])

    return start


def _options(flags: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return the options for run_distribute.sh, None where nothing is to be launched. Raises
    ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog="oneflow_gpt.training", add_help=False, allow_abbrev=False
    )
    for name in ("gpus-per-node", "nodes"):
        parser.add_argument(f"--num-{name}", type=argument(1, MOST_RANKS), default=1)
    parser.add_argument("--node-ips", default="")
    parser.add_argument("--ctrl-port", type=argument(1, 65535))
    parser.add_argument("--use-rdma", action="store_true")
    given = parser.parse_known_args(flags)[0]
    world = given.num_nodes * given.num_gpus_per_node
    if world == 1 or find_process(environ).world_size > 1:
        return None
    words = ["--devices", ",".join(map(str, range(given.num_gpus_per_node)))]
    words += ["--use_rdma"] if given.use_rdma else []
    if given.num_nodes == 1:
        return words
    if not given.node_ips:
        raise ConfigError(
            f"--num-nodes {given.num_nodes} needs --node-ips: the addresses of the nodes with"
            " commas between, that of rank 0 first"
        )
    first = given.node_ips.partition(",")[0].strip()
    port = ["--master", f"{first}:{given.ctrl_port}"] if given.ctrl_port else []
    return [*words, *port, "--nnodes", str(given.num_nodes), "--node_ips", given.node_ips]
