"""Run lm-evaluation-harness with the model ``gpt2_toolkit``; all options are the harness's own.

    python tools/lm_eval.py --model gpt2_toolkit --model_args path=output/first,backend=torch \\
        --batch_size 8 --include_path configs/lm_eval --tasks lambada_local \\
        --metadata '{"lambada": "data/lambada_test.jsonl"}'

path is any folder that holds a model: a run, a checkpoint, an export, a Hugging Face folder.
docs/lm_eval.md has the tasks that need no network. It needs the extra eval. The harness shows
its options with `run --help`.

Exit codes: 0 success, 2 bad input, else the harness's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file has the harness's name

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import GPT2Error, report
from common.packages import require_package


def main() -> int:
    if sys.argv[1:] in (["--help"], ["-h"], []):
        print(f"usage: lm_eval.py [run | ls | validate] [options]\n\n{__doc__}")
        return 0
    try:
        require_package("lm_eval", extra="eval", purpose="which has the tasks")
        from lm_eval.__main__ import cli_evaluate

        import gpt2_toolkit.lm_eval  # noqa: F401  registers the model

        cli_evaluate()
    except GPT2Error as error:
        return report(error)
    return 0


if __name__ == "__main__":
    run_script(main)
