#!/usr/bin/env bash
# Start one process on one device and wait for it, from any folder; its log is mf_standalone/mindformer.log in the run folder:
#
#   bash run_standalone.sh CONFIG DEVICE_ID train [section.key=value ...]
#
# Options, DRY_RUN=1, DETACH=1 and exit codes as those of run_distribute.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_without_python "$@"
use_python
exec "$PYTHON" "$ROOT/tools/launch.py" standalone "$@"
