"""PaddleFleetX's ``python tasks/gpt/generation.py -c CONFIG -o Section.key=value``: continue
Generation.input_text, predict.prompt or FleetX's own prompt.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[3]}/programs.py", {"SCRIPT": __file__})
