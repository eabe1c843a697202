#!/usr/bin/env bash
# The study DistributedTrainingGPT2's make_vocab.sh, started in cache/: the vocabulary of ../data/train.json, as large as its model takes.
# The original asks for 50000 tokens; 26674 and five marks are the 26679 rows of config/model_config.json. --vocab_size N changes it.
#
#   cd cache && bash make_vocab.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$here/../../.." && pwd)"
. "$ROOT/scripts/environment.sh"
help_without_python "$@"
use_python
exec "$PYTHON" "$here/make_vocab.py" --raw_data_path ../data/train.json --vocab_file vocab_user.txt --vocab_size 26674 "$@"
