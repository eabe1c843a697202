"""PaddleFleetX's ``python tools/eval.py -c CONFIG -o Section.key=value``: measure a checkpoint on
Offline_Eval.eval_path.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
