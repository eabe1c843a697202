#!/usr/bin/env bash
# usage: bash scripts/quickstart.sh [--zh] [section.key=value ...]
#
# From nothing to a trained GPT-2 on real text: makes the environment .venv (1.2 GB, 4.8 GB with CUDA), fetches a corpus, trains a vocabulary of 8,192
# tokens (Chinese: 4,096) and a model of 3 million parameters (minutes on 2 CPU cores), validates and generates. The run folder is
# output/quickstart, with --zh output/quickstart_zh. Starting it again does only what is missing.
#
#   bash scripts/quickstart.sh                         Shakespeare's plays
#   bash scripts/quickstart.sh --zh                    poems of the Tang dynasty, in Chinese
#   bash scripts/quickstart.sh train.max_steps=50      any key of the configuration may follow
#   QUICKSTART_EXTRAS=all bash scripts/quickstart.sh   installs every extra that the machine can hold, too
#
# exit codes: 0 success, 1 a step failed, 2 a wrong argument, 130 Ctrl-C (the same command resumes from there)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_at_head "$@"
cd "$ROOT"

EXTRAS=${QUICKSTART_EXTRAS:-}
if [ "$EXTRAS" = all ]; then EXTRAS=dev,deepspeed,mindspore; fi

ENDING='' LANGUAGE=en SIZE=8192 PROMPT="The king" OTHER=ROMEO
if [ "${1:-}" = --zh ]; then
    shift
    ENDING=_zh LANGUAGE=zh SIZE=4096 PROMPT=《春夜》 OTHER=《江上》
fi
CONFIG=configs/gpt2/run_gpt2_quickstart$ENDING.yaml
RUN=output/quickstart$ENDING
DATA=data/quickstart$ENDING

# tokens NAME FOLDER: the corpus in the tokens of FOLDER's vocabulary, unless it is there
tokens() {
    [ "$DATA/$1_text_document.idx" -nt "$DATA/corpus.txt" ] ||
        "$PYTHON" tools/preprocess_data.py --input "$DATA/corpus.txt" --documents eot --vocab-file "$2" --output-prefix "$DATA/$1"
}

use_environment torch,fast "$EXTRAS"

echo "== 1/4 corpus"
"$PYTHON" tools/fetch_quickstart_data.py --output "$DATA" --language "$LANGUAGE"

echo "== 2/4 vocabulary and tokens"
[ "$DATA/small/merges.txt" -nt "$DATA/corpus.txt" ] ||
    "$PYTHON" tools/train_tokenizer.py --input "$DATA/corpus.txt" --output-folder "$DATA/small" --vocab-size "$SIZE"
tokens small "$DATA/small"
if [ "$LANGUAGE" = en ]; then tokens corpus "$DATA"; fi # GPT-2's own tokens, for the presets of its sizes

echo "== 3/4 training (a finished run is left as it is, a stopped one resumes)"
"$PYTHON" run_gpt2.py --config "$CONFIG" --run_mode train "$@"

echo "== 4/4 generation"
"$PYTHON" run_gpt2.py --config "$CONFIG" --run_mode predict "$@" \
    predict.prompt="$PROMPT" predict.top_k=40 predict.temperature=0.8 predict.max_new_tokens=100

echo
echo "Done. The run is in $RUN: config.yaml  metrics.jsonl  loss.png  checkpoints/  tensorboard/"
if [ "$PYTHON" = "$ROOT/.venv/bin/python" ]; then
    PYTHON=python
    echo "In each terminal: source .venv/bin/activate"
fi
cat <<END
another text:   $PYTHON run_gpt2.py --config $RUN/config.yaml --run_mode predict predict.prompt="$OTHER" predict.top_k=40 predict.temperature=0.8
train on:       $PYTHON run_gpt2.py --config $CONFIG --run_mode train train.max_steps=1500
your own text:  $PYTHON tools/preprocess_data.py --input $DATA/corpus.txt --output-prefix data/own --vocab-file $DATA/small --documents eot
then train it:  $PYTHON run_gpt2.py --config $CONFIG --run_mode train output_dir=output/own data.train=data/own_text_document
Put your file in place of $DATA/corpus.txt, and leave out --documents eot if blank lines divide it.
END
