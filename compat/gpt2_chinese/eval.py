"""GPT2-Chinese's ``python eval.py FLAGS``: measure the perplexity of a model."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[1]}/programs.py", {"SCRIPT": __file__})
