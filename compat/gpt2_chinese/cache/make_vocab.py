"""GPT2-Chinese's ``python make_vocab.py --raw_data_path FILE --vocab_file FILE --vocab_size N``:
write the vocabulary of a corpus, as tools/make_vocab.py does.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from common.program import start

    start("compat/programs.py", __file__)
