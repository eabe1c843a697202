"""GPT2-Chinese's ``python eval.py FLAGS``: measure the perplexity of a model."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common.program import start

    start("compat/programs.py", __file__)
