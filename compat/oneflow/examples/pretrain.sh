#!/usr/bin/env bash
# OneFlow-Benchmark's training, from its variables ONEFLOW_GPT_*; the scripts beside it set those of a size:
#
#   ONEFLOW_GPT_DATASET=data/my_text_document bash examples/pretrain_345M.sh [section.key=value ...]
#
# On several nodes start the same command on each, with ONEFLOW_GPT_NUM_NODES and ONEFLOW_GPT_NODE_IPS=IP,IP,...: a node finds its
# place by its address. ONEFLOW_COMM_NET_IB_ENABLE=1: NCCL only over InfiniBand or RoCE. Exit code: that of the run.
set -euo pipefail
root="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
flags="$(mktemp --suffix=.flags)"
trap 'rm -f "$flags"' EXIT
devices="${ONEFLOW_GPT_NUM_GPUS_PER_NODE:-4}" nodes="${ONEFLOW_GPT_NUM_NODES:-1}"
{
    echo "# flags of the command line of oneflow_gpt.training" # what messages call them
    echo "--num-layers ${ONEFLOW_GPT_NUM_LAYERS:-16} --hidden-size ${ONEFLOW_GPT_HIDDEN_SIZE:-1536}"
    echo "--num-attention-heads ${ONEFLOW_GPT_NUM_ATTENTION_HEADS:-16} --seq-length ${ONEFLOW_GPT_SEQ_LENGTH:-2048}"
    echo "--micro-batch-size ${ONEFLOW_GPT_MICRO_BATCH_SIZE:-8}"
    [[ -z "${ONEFLOW_GPT_GLOBAL_BATCH_SIZE:-}" ]] || echo "--global-batch-size $ONEFLOW_GPT_GLOBAL_BATCH_SIZE"
    [[ -z "${ONEFLOW_GPT_NUM_ACCUMULATION_STEPS:-}" ]] || echo "--num-accumulation-steps $ONEFLOW_GPT_NUM_ACCUMULATION_STEPS"
    echo "--tensor-model-parallel-size ${ONEFLOW_GPT_TENSOR_MODEL_PARALLEL_SIZE:-1}"
    echo "--pipeline-model-parallel-size ${ONEFLOW_GPT_PIPELINE_MODEL_PARALLEL_SIZE:-1}"
    echo "--num-gpus-per-node $devices --num-nodes $nodes --train-iters ${ONEFLOW_GPT_TRAIN_ITERS:-500000}"
    echo "--learning-rate 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01"
    echo "--initial-loss-scale ${ONEFLOW_GPT_INIT_LOSS_SCALE:-4294967296} --optimizer adamw --weight-decay 1e-2 --clip-grad 1.0"
    printf -- '--dataset %q\n' "${ONEFLOW_GPT_DATASET:-/data/gpt/gpt_sample_dataset_text_document}"
    echo "--split 949,50,1 --checkpoint-activations --multihead-attention-fusion --fp16"
    printf -- '--load %q --save %q\n' "${ONEFLOW_GPT_LOAD_PATH:-checkpoint}" "${ONEFLOW_GPT_SAVE_PATH:-checkpoint}"
    echo "--save-interval ${ONEFLOW_GPT_SAVE_INTERVAL:-10000} --log-interval ${ONEFLOW_GPT_LOG_INTERVAL:-100}"
} >"$flags"
places=()
if ((nodes > 1)); then
    addresses="${ONEFLOW_GPT_NODE_IPS:?give the addresses of all nodes: ONEFLOW_GPT_NODE_IPS=IP,IP,...}"
    places=(--nnodes "$nodes" --node_ips "$addresses" --master "${addresses%%,*}:${ONEFLOW_GPT_CTRL_PORT:-29500}")
fi
[[ "${ONEFLOW_COMM_NET_IB_ENABLE:-0}" == 0 ]] || places+=(--use_rdma)
bash "$root/scripts/run_distribute.sh" "${places[@]}" none "$flags" "[0,$devices]" train "$@"
