"""run_gpt2.py under the name that MindFormers' users and their ModelArts jobs know, with the
arguments of MindFormers r0.3.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.modelarts.arguments import describe_flags, mindformers_argv
from common.training.stop import end_process
from run_gpt2 import main

if __name__ == "__main__":
    end_process(
        main(mindformers_argv(sys.argv[1:]), program="run_mindformer.py", more=describe_flags())
    )
