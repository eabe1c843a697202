"""PaddleFleetX's ``python tools/train.py -c CONFIG -o Section.key=value``: train what the file says."""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
