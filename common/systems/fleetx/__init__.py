"""PaddleFleetX's GPT: ``fleetx``."""

from common.systems.fleetx.read import detects, open_fleetx
from common.systems.fleetx.write import write_fleetx
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "fleetx": WeightFormat(
            title="a checkpoint of PaddleFleetX",
            detects=detects,
            open=open_fleetx,
            write=write_fleetx,
            holds_run=False,
        )
    }
)
