"""GPT2-Chinese's ``python make_vocab.py --raw_data_path FILE --vocab_file FILE --vocab_size N``:
write the vocabulary of a corpus, as tools/make_vocab.py does.
"""

import runpy
from pathlib import Path

runpy.run_path(f"{Path(__file__).resolve().parents[2]}/programs.py", {"SCRIPT": __file__})
