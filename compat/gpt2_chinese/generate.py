"""GPT2-Chinese's ``python generate.py FLAGS``: continue a prefix."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
