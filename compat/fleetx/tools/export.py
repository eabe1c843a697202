"""PaddleFleetX's ``python tools/export.py -c CONFIG -o Section.key=value``: write the weights of a
checkpoint as one file.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
