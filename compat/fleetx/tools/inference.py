"""PaddleFleetX's ``python tools/inference.py -c CONFIG -o Inference.model_dir=DIR``: continue
prompts with what tools/export.py wrote to DIR.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from common.program import start

    start("compat/programs.py", __file__)
