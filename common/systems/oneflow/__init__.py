"""OneFlow-Benchmark's GPT: ``oneflow``."""

from common.systems.oneflow.read import detects, open_oneflow
from common.systems.oneflow.write import write_oneflow
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "oneflow": WeightFormat(
            title="a snapshot of OneFlow's GPT",
            detects=detects,
            open=open_oneflow,
            write=write_oneflow,
        )
    }
)
