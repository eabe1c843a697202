#!/usr/bin/env bash
# The study DistributedTrainingGPT2's generate.sh: five samples of 15000 tokens that begin with 她.
#
#   bash generate.sh [section.key=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$here/../.." && pwd)"
. "$ROOT/scripts/environment.sh"
help_without_python "$@"
use_python
exec "$PYTHON" "$here/generate.py" --device 0 --length 15000 --tokenizer_path cache/vocab_user.txt \
    --model_path model/final_model --prefix 她 --nsamples 5 --topp 1 --temperature 1.0 "$@"
