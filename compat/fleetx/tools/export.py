"""PaddleFleetX's ``python tools/export.py -c CONFIG -o Section.key=value``: write the weights of a
checkpoint as one file.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from common.program import start

    start("compat/programs.py", __file__)
