#!/usr/bin/env bash
# usage: bash scripts/test.sh [--all] [pytest's arguments ...]
#
# Makes the environment .venv with every extra (torch, MindSpore, DeepSpeed, development tools) and runs the tests, a process more than
# there are cores, up to four. An extra without a package for this Python or processor is left out with a line, and the tests that need it
# are skipped; the end says how many, by reason. Without --all, tests that take minutes are left out, and a smaller one stands for each kind
# of them.
#
#   bash scripts/test.sh                               the short suite: five minutes on two idle cores
#   bash scripts/test.sh --all                         the whole suite: about twelve minutes on two idle cores
#   bash scripts/test.sh tests/common -k batch         a part; all arguments go to pytest (its own: .venv/bin/python -m pytest --help)
#
# exit codes: 0 all passed, 1 some failed, 2 interrupted or a wrong argument, 5 no test was found
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_at_head "$@"
cd "$ROOT"
use_environment torch,dev fast,export,serve,study,parquet,hub,chinese,fp8,deepspeed,mindspore
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE  # or each of the many processes compiles its framework's modules: 3.0 instead of 1.5 s for torch
# one more than there are cores: tests of time limits wait, and leave a core to another
PROCESSES=$("$PYTHON" -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
"$PYTHON" -m pytest --numprocesses "$PROCESSES" --dist loadscope --no-loadscope-reorder "$@"
