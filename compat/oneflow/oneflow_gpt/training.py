"""OneFlow's ``python -m oneflow_gpt.training FLAGS``: train what the flags say, on all devices of
this node that they name.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
