"""GPT2-Chinese's ``python train_single.py FLAGS``: train on a JSON array whose texts are one."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
