"""PaddleFleetX's ``python tasks/gpt/generation.py -c CONFIG -o Section.key=value``: continue
Generation.input_text, predict.prompt or FleetX's own prompt.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
    from common.program import start

    start("compat/programs.py", __file__)
