#!/usr/bin/env bash
# From nothing to a trained GPT-2 on real text: environment, vocabulary, corpus, training, validation, generation.
#
#   bash scripts/quickstart.sh                         about 11M parameters, a few minutes on 2 CPU cores
#   QUICKSTART_EXTRAS=all bash scripts/quickstart.sh   installs every extra that the machine can hold, too
#   bash scripts/quickstart.sh train.max_steps=50      any key of the configuration may follow
#
# The run folder is output/quickstart. Starting it again does only what is missing.
set -euo pipefail
for word in "$@"; do case "$word" in --help | -h)
    cat <<'END'
usage: bash scripts/quickstart.sh [section.key=value ...]

From nothing to a trained GPT-2 on real text: makes the environment .venv (about 1.2 GB), fetches vocabulary and corpus, trains about 11M
parameters for 300 steps (a few minutes on 2 CPU cores), validates and generates. The run folder is output/quickstart. Starting it again
does only what is missing.

  bash scripts/quickstart.sh                         the whole of it
  bash scripts/quickstart.sh train.max_steps=50      any key of the configuration may follow
  QUICKSTART_EXTRAS=all bash scripts/quickstart.sh   installs every extra that the machine can hold, too

exit codes: 0 success, 1 a step failed, 2 a wrong argument, 130 Ctrl-C (the same command resumes from there)
END
    exit 0 ;;
esac; done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

EXTRAS=${QUICKSTART_EXTRAS:-}
if [ "$EXTRAS" = all ]; then EXTRAS=dev,deepspeed,mindspore; fi
use_environment torch,fast "$EXTRAS"

CONFIG=configs/gpt2/run_gpt2_tiny.yaml
RUN=output/quickstart
DATA=data/quickstart
OVERRIDES=("output_dir=$RUN" "$@")

echo "== 1/4 vocabulary and corpus"
"$PYTHON" tools/fetch_quickstart_data.py --output "$DATA"

echo "== 2/4 text to tokens"
if [ ! -f "$DATA/corpus_text_document.idx" ] || [ "$DATA/corpus.txt" -nt "$DATA/corpus_text_document.idx" ]; then
    "$PYTHON" tools/preprocess_data.py --input "$DATA/corpus.txt" --documents eot --output-prefix "$DATA/corpus" \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$DATA/vocab.json" --merge-file "$DATA/merges.txt" --append-eod
else
    echo "already there: $DATA/corpus_text_document.{bin,idx}"
fi

echo "== 3/4 training (a finished run is left as it is, a stopped one resumes)"
"$PYTHON" run_gpt2.py --config "$CONFIG" --run_mode train "${OVERRIDES[@]}"

echo "== 4/4 generation"
"$PYTHON" run_gpt2.py --config "$CONFIG" --run_mode predict "${OVERRIDES[@]}" \
    "predict.prompt=The king" predict.strategy=sampling predict.top_k=40 predict.max_new_tokens=60

cat <<END

Done. The run is in $RUN:
  config.yaml  metrics.jsonl  loss.png  checkpoints/  tensorboard/   (pip install tensorboard; tensorboard --logdir $RUN)

Next:
END
if [ "$PYTHON" = "$ROOT/.venv/bin/python" ]; then
    PYTHON=python
    echo "  in each terminal source .venv/bin/activate"
fi
cat <<END
  another prompt   $PYTHON run_gpt2.py --config $RUN/config.yaml --run_mode predict "predict.prompt=To be" \\
                       predict.strategy=sampling predict.top_k=40
  train on         $PYTHON run_gpt2.py --config $CONFIG --run_mode train output_dir=$RUN train.max_steps=600
  your own text    $PYTHON tools/preprocess_data.py --input FILE.txt --output-prefix data/own \\
                       --vocab-file $DATA/vocab.json --merge-file $DATA/merges.txt
                   $PYTHON run_gpt2.py --config $CONFIG --run_mode train output_dir=output/own \\
                       data.train=data/own_text_document
  GPT-2 124M       $PYTHON run_gpt2.py --config configs/gpt2/run_gpt2_124m.yaml --run_mode train \\
                       data.train=$DATA/corpus_text_document data.tokenizer=$DATA train.max_steps=2 \\
                       train.micro_batch_size=1 train.global_batch_size=4 validation.max_samples=4 precision=float32
                   (two small steps as a trial on a CPU: minutes, and about 7 GiB of memory; on GPUs leave out what follows data.tokenizer)
END
