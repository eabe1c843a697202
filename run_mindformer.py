"""run_gpt2.py under the name that MindFormers' users and their ModelArts jobs know, with the
arguments of MindFormers r0.3.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from common.program import start

    start(__file__)

from common.modelarts.arguments import describe_flags, mindformers_argv
from run_gpt2 import main as run


def main(argv: list[str] | None = None) -> int:
    words, file = mindformers_argv(sys.argv[1:] if argv is None else argv)
    return run(words, program="run_mindformer.py", more=describe_flags(), file=file)
