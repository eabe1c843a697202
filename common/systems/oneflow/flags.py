"""Translation of OneFlow-Benchmark's command line, by the rules of ``common.dialects.oneflow``.

What a value does: training.py, optimizer.py and snapshot.py of OneFlow-Benchmark before fe1e78e.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.dialects.megatron import STATIC
from common.dialects.oneflow import (
    DEFAULTS,
    PROGRAM,
    SYSTEM,
    TABLE,
    above_zero,
)
from common.systems.dialect import (
    Dialect,
    Theirs,
    Translation,
    apply,
    require_all_taken,
)


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of OneFlow's flags, by name and value. Raises ConfigError for flags
    that this project cannot follow.
    """
    theirs, ours = Theirs(SYSTEM, tree, sources, DEFAULTS), Translation()
    ours.set("output_dir", "output")
    ours.set("validation.interval", "never")
    scale, flag = theirs.take("loss_scale"), "initial_loss_scale"
    if scale is not None:
        try:
            scale = above_zero(scale)
        except ValueError as error:
            theirs.refuse("loss_scale", scale, str(error))
        ours.put("loss_scale.mode", "static", theirs, "loss_scale")
        ours.put("loss_scale.initial", scale, theirs, "loss_scale")
        if not theirs.is_left_out(flag):
            ours.leave_out(theirs, flag, STATIC)
    samples = theirs.take_count("train_samples")
    if samples is not None and not theirs.is_left_out("train_iters"):
        ours.note("train_samples", "--train-iters says it")
    elif samples is not None:
        tokens = samples * theirs.peek_count("seq_length")
        ours.put("train.max_tokens", tokens, theirs, "train_samples")
    flag = "lr_warmup_fraction"
    if theirs.peek(flag) is not None and theirs.is_left_out("lr_decay_iters"):
        ours.leave_out(theirs, flag, "it is a part of --lr-decay-iters, which is not given")
    save, load = theirs.take("save"), theirs.take("load")
    if save is not None:
        ours.put("output_dir", str(save), theirs, "save")
    if load is not None and load != save:
        ours.put("checkpoint.resume", str(load), theirs, "load")
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    return ours


DIALECT = Dialect(
    system=SYSTEM, table=TABLE, defaults=DEFAULTS, translate=translate, programs=(PROGRAM,)
)
