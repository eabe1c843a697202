"""Megatron-DeepSpeed: ``deepspeed``, read only."""

from common.systems.deepspeed.read import detects, open_deepspeed
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "deepspeed": WeightFormat(
            title="a checkpoint of Megatron-DeepSpeed", detects=detects, open=open_deepspeed
        )
    }
)
