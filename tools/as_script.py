"""Runs the program that imports this: its first statement, so that Ctrl-C ends it at once while it
loads the rest.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.program import start

start(str(sys.modules["__main__"].__file__))
