"""Megatron-LM's and Megatron-DeepSpeed's ``pretrain_gpt.py FLAGS``: train what the flags say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.systems.flag_scripts import main_with_flags
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(main_with_flags(main, sys.argv[1:], "pretrain_gpt.py"))
