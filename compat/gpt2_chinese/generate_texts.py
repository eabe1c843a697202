"""GPT2-Chinese's ``python generate_texts.py FLAGS``: write several articles for each title."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
