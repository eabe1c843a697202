"""PaddleFleetX's ``python tools/eval.py -c CONFIG -o Section.key=value``: measure a checkpoint on
Offline_Eval.eval_path.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.systems.fleetx.scripts import run_script
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(run_script(main, "eval", sys.argv[1:], "tools/eval.py"))
