"""OneFlow's ``python -m oneflow_gpt.training FLAGS``: train what the flags say, on all devices of
this node that they name.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from common.program import start

    start("compat/programs.py", __file__)
