#!/usr/bin/env bash
# Start the ranks of this machine and wait for them, from any folder:
#
#   bash run_distribute.sh RANK_TABLE CONFIG '[0,8]' train             the devices 0-7 of one machine (the end is exclusive)
#   bash run_distribute.sh RANK_TABLE CONFIG '[8,16]' train 32         the ranks 8-15 of 32, each machine its own range
#   bash run_distribute.sh none CONFIG '[0,4]' train train.max_steps=9 no rank table; any key of the configuration may follow
#   DRY_RUN=1 bash run_distribute.sh ...                               show what each rank would get; start nothing
#   DETACH=1 bash run_distribute.sh ...                                return at once and say how to stop
#
# Exit code 0: all ranks ended well; 2: bad arguments; else that of the first rank that failed. All options: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_without_python "$@"
use_python
exec "$PYTHON" "$ROOT/tools/launch.py" distribute "$@"
