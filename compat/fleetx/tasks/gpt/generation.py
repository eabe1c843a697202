"""PaddleFleetX's ``python tasks/gpt/generation.py -c CONFIG -o Section.key=value``: continue
Generation.input_text, predict.prompt or FleetX's own prompt.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.systems.fleetx.scripts import run_script
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(run_script(main, "predict", sys.argv[1:], "tasks/gpt/generation.py"))
