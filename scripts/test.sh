#!/usr/bin/env bash
# Make the environment and run the whole test suite. Arguments go to pytest: bash scripts/test.sh tests/common -k batch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment torch,fast,mindspore,dev
"$PYTHON" -m pytest "$@"
