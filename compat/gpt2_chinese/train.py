"""GPT2-Chinese's ``python train.py FLAGS``: train on a JSON array of texts."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
