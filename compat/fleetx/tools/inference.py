"""PaddleFleetX's ``python tools/inference.py -c CONFIG -o Inference.model_dir=DIR``: continue
prompts with what tools/export.py wrote to DIR.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.systems.fleetx.scripts import infer
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(infer(main, sys.argv[1:], "tools/inference.py"))
