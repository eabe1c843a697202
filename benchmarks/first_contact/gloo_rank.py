"""A rank of run_gpt2.py that shares its GPU with the others, and sends tensors of it by gloo.

    python tools/compare_runs.py CONFIG CONFIG --ranks_b 2 \\
        --program_b benchmarks/first_contact/gloo_rank.py

NCCL takes one rank for each GPU. This runs the code of several ranks where there is one GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch_gpt2.device as devices
from run_gpt2 import main

if __name__ == "__main__":
    devices._COMMUNICATION["cuda"] = "gloo"
    devices.device_index = lambda *_: 0  # type: ignore[attr-defined]
    sys.exit(main())
