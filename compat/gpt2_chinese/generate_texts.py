"""GPT2-Chinese's ``python generate_texts.py FLAGS``: write several articles for each title."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common.program import start

    start("compat/programs.py", __file__)
