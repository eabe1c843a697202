"""GPT2-Chinese's ``python make_vocab.py --raw_data_path FILE --vocab_file FILE --vocab_size N``:
write the vocabulary of a corpus, as tools/make_vocab.py does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from tools.make_vocab import main

if __name__ == "__main__":
    run_script(main)
