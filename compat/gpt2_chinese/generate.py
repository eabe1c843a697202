"""GPT2-Chinese's ``python generate.py FLAGS``: continue a prefix."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.conversion.gpt2_chinese import run_command
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(run_command(main, "generate.py", sys.argv[1:]))
