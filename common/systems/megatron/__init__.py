"""Megatron-LM and Megatron-Core: ``megatron`` and ``megatron_core``, with a file for each tensor
and pipeline rank.
"""

from functools import partial

from common.systems.megatron.read import detects, open_megatron
from common.systems.megatron.write import write_megatron
from common.systems.weight_format import System, WeightFormat


def _format(name: str, title: str) -> WeightFormat:
    return WeightFormat(
        title=title,
        detects=partial(detects, format=name),
        open=partial(open_megatron, format=name),
        write=partial(write_megatron, format=name),
        write_shards=partial(write_megatron, format=name),
    )


SYSTEM = System(
    weight_formats={
        "megatron": _format("megatron", "a checkpoint of Megatron-LM"),
        "megatron_core": _format("megatron_core", "a checkpoint of Megatron-Core"),
    }
)
