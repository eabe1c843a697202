#!/usr/bin/env bash
# The Ascend ModelZoo's measurement of speed: as train_full_8p.sh, over 300 steps unless --train_iters says otherwise.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
train_8p 300 "$@"
