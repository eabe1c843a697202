#!/usr/bin/env bash
# The Ascend ModelZoo's training of GPT-2 on one server of 8 devices, with its words and its last lines:
#
#   bash ./test/train_full_8p.sh --data_path=DIR [--model_size=345M] [--train_iters=500000] [section.key=value ...]
#
# DIR holds gpt2-vocab.json, gpt2-merges.txt and my-gpt_text_sentence.{bin,idx}, as test/dataset_preprocess_gpt.sh makes them.
# Sizes: 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp. Logs: test/output/0/train_0.log. Checkpoints: ckpts/ckpts_tmp.
# DEVICES=2 in front of the command takes another number of devices. Exit code: that of the run; 1 for wrong arguments.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
train_8p 500000 "$@"
