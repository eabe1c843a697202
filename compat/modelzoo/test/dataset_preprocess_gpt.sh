#!/usr/bin/env bash
# The Ascend ModelZoo's data for GPT-2 from text of one's own; nothing is downloaded:
#
#   bash ./test/dataset_preprocess_gpt.sh TEXT.json VOCAB.json MERGES.txt [DIR]
#
# TEXT.json has one object with the field text on each line, as WikiExtractor --json writes them. DIR (./data when left out) gets
# gpt2-vocab.json, gpt2-merges.txt and my-gpt_text_sentence.{bin,idx}, which train_full_8p.sh takes as --data_path=DIR.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
if [[ " $* " == *" --help "* ]]; then
    sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"
    exit
elif (($# < 3)); then
    sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
folder="${4:-data}"
for file in "$1" "$2" "$3"; do
    [[ -f "$file" ]] || { echo "error: $file: no such file; check the path" >&2; exit 2; }
done
mkdir -p "$folder"
[[ "$2" -ef "$folder/gpt2-vocab.json" ]] || cp "$2" "$folder/gpt2-vocab.json"
[[ "$3" -ef "$folder/gpt2-merges.txt" ]] || cp "$3" "$folder/gpt2-merges.txt"
source "$root/scripts/environment.sh"
use_python
"$PYTHON" "$root/tools/preprocess_data.py" --input "$1" --output-prefix "$folder/my-gpt" --vocab-file "$folder/gpt2-vocab.json" \
    --merge-file "$folder/gpt2-merges.txt" --dataset-impl mmap --tokenizer-type GPT2BPETokenizer --split-sentences --workers "$(nproc)"
