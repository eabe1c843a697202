#!/usr/bin/env bash
# The study DistributedTrainingGPT2's train.sh: train data/train.json with the vocabulary cache/vocab_user.txt.
#
#   bash train.sh [--flag value ...] [section.key=value ...]
#
# A flag wins over the script's. --show_config prints the YAML that the flags become, and starts nothing.
# VARIANT is the name of one of its five folders (default: the folder that you are in). DEVICES is the number of processes (default: 4).
# Exit code: that of the run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$here/../.." && pwd)"
. "$ROOT/scripts/environment.sh"
help_without_python "$@"
use_python
devices="${DEVICES:-4}"
start=("$PYTHON" -m torch.distributed.run --nproc_per_node="$devices")
horovod=(horovodrun -np "$devices" -H "localhost:$devices" "$PYTHON")
case "${VARIANT:-$(basename "$PWD")}" in
    GPT2-Chinese-Parallel) flags=(--epochs 400 --batch_size "$((devices < 4 ? 4 / devices : 1))" parallel.strategy=SPS) ;;
    GPT2-Chinese-Parallel-Distributed-Apex) flags=(--epochs 800 --batch_size 4 --fp16 --fp16_opt_level O2) ;;
    GPT2-Chinese-Parallel-Distributed-Horovod) start=("${horovod[@]}") flags=(--epochs 4000 --batch_size 4 parallel.strategy=horovod) ;;
    GPT2-Chinese-Parallel-Distributed-Horovod-Apex)
        start=("${horovod[@]}") flags=(--epochs 4000 --batch_size 4 --fp16 parallel.strategy=horovod) ;;
    *) flags=(--epochs 800 --batch_size 2) ;; # GPT2-Chinese-Parallel-Distributed
esac
train=("$here/train.py" --model_config config/model_config.json --tokenized_data_path data/tokenized/
    --tokenizer_path cache/vocab_user.txt --raw_data_path data/train.json --log_step 200 --stride 512 --output_dir model/
    --num_pieces 100 --raw "${flags[@]}" "$@")
case " $* " in *" --show_config "* | *" --help "* | *" --prepare "*) exec "$PYTHON" "${train[@]}" ;; esac
command -v "${start[0]}" > /dev/null || {
    echo "error: ${start[0]}: not found; install Horovod, or set VARIANT to a folder without it" >&2
    exit 2
}
"$PYTHON" "${train[@]}" --prepare # what is wrong is said once, before there are ranks
exec "${start[@]}" "${train[@]}"
