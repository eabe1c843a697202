"""Megatron-LM's and Megatron-DeepSpeed's ``pretrain_gpt.py FLAGS``: train what the flags say."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
