"""Translation of OneFlow-Benchmark's command line, by the rules of ``common.dialects.oneflow``.

What a value does: training.py, optimizer.py and snapshot.py of OneFlow-Benchmark before fe1e78e.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from common.cluster.environment import find_process
from common.dialects.megatron import STATIC
from common.dialects.oneflow import DEFAULTS, POSITIVE, TABLE
from common.dialects.rules import Ignored, MapTo, Rule
from common.errors import ConfigError
from common.flags import at_least
from common.systems.dialect import Dialect, ForeignKeys, Translation, apply
from common.whole_numbers import MAX_RANKS


def _translate(theirs: ForeignKeys, ours: Translation) -> None:
    rules: dict[str, Rule] = {"save": MapTo("output_dir", str)}
    if theirs.peek("loss_scale") is not None:
        ours.put("loss_scale.mode", "static", theirs, "loss_scale")
        rules |= {"loss_scale": MapTo("loss_scale.initial", POSITIVE), "initial_loss_scale": Ignored(STATIC)}
    samples = theirs.take_count("train_samples")
    if samples is not None and not theirs.is_left_out("train_iters"):
        ours.note("train_samples", "--train-iters says it")
    elif samples is not None:
        tokens = samples * theirs.peek_count("seq_length")
        ours.put("train.max_tokens", tokens, theirs, "train_samples")
    if theirs.is_left_out("lr_decay_iters"):
        rules["lr_warmup_fraction"] = Ignored("it is a part of --lr-decay-iters, which is not given")
    load = theirs.take("load")
    if load is not None and load != theirs.peek("save"):
        ours.put("checkpoint.resume", str(load), theirs, "load")
    apply(rules, theirs, ours)


DIALECT = Dialect(
    system="OneFlow",
    table=TABLE,
    defaults=DEFAULTS,
    begin={"output_dir": "output", "validation.interval": "never"},
    parts=(_translate,),
    programs=("oneflow_gpt.training",),
)


def start_nodes_devices(
    run: Callable[..., int], launch: Callable[[list[str]], int], flags: Sequence[str]
) -> Callable[..., int]:
    """Return the function to call for a training with these flags: ``run``, or a launch of several ranks.

    run: ``main`` of run_gpt2.py, for a single device or a rank that another launcher has started. launch: ``main`` of
    tools/launch.py. The function raises ConfigError.
    """

    def start(argv: list[str], *, program: str) -> int:
        is_question = not {"--show_config", "--help", "-h"}.isdisjoint(argv)
        if is_question or (options := _options(flags, os.environ)) is None:
            return run(argv, program=program)
        _, config, _, mode, *overrides = argv  # --config FILE --run_mode train KEY=VALUE ...
        return launch(["distribute", *options, "none", config, mode, *overrides])

    return start


def _options(flags: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return the options for run_distribute.sh, None where nothing is to be launched. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="oneflow_gpt.training", add_help=False, allow_abbrev=False)
    for name in ("gpus-per-node", "nodes"):
        parser.add_argument(f"--num-{name}", type=at_least(1, MAX_RANKS), default=1)
    parser.add_argument("--node-ips", default="")
    parser.add_argument("--ctrl-port", type=at_least(1, 65535))
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
