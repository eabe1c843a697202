#!/usr/bin/env bash
# Make the environment and run the whole test suite, a process a core up to four. Arguments go to pytest: bash scripts/test.sh tests/common -k batch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment torch,fast,mindspore,deepspeed,dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -m pytest --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder "$@"
