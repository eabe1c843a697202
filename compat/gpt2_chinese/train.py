"""GPT2-Chinese's ``python train.py FLAGS``: train on a JSON array of texts."""

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
    end_process(run_command(main, "train.py", sys.argv[1:]))
