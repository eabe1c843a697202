"""PaddleFleetX's ``python tools/inference.py -c CONFIG -o Inference.model_dir=DIR``: continue
prompts with what tools/export.py wrote to DIR.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
