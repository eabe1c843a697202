#!/usr/bin/env bash
# usage: sbatch [sbatch's options] scripts/run_slurm.sh [--max_restarts N] CONFIG MODE [section.key=value ...]
#
# A Slurm job: one task a device, each of them run_gpt2.py, which finds its rank in Slurm's variables. Submit it from the repository, or
# set GPT2_ROOT to it. The #SBATCH lines of this file are the defaults; options before its name win.
# A failed task ends the job. Ten minutes before the time limit every task is sent SIGTERM: the ranks save and end, and the same command
# submitted again resumes from there. With --max_restarts each node has one task, the launcher, which starts all ranks.
#
#   CONFIG            the run's YAML, for example configs/gpt2/run_gpt2_1.3b_fleetx.yaml
#   MODE              train, finetune, eval, predict, export or plan
#   --max_restarts N  start all ranks again after a failure, up to N times, from the newest complete checkpoint
#
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 scripts/run_slurm.sh configs/gpt2/run_gpt2_1.3b_fleetx.yaml train
#
# exit codes: 0 success, 2 a word or the configuration is at fault, 143 the time limit came (submit it again to resume), else that of
# the first task that failed
#SBATCH --job-name=gpt2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

# Commands that the cluster asks for, such as:
# module load cuda/12.4
# conda activate gpt2

for word in "$@"; do case "$word" in --help | -h)
    sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p}' "$0"
    exit 0 ;;
esac; done
case "${1:-}" in
--max_restarts=* | --max-restarts=*) RESTARTS=${1#*=} && shift ;;
--max_restarts | --max-restarts) RESTARTS=${2:-} && shift "$(($# < 2 ? $# : 2))" ;;
*) RESTARTS=none ;;
esac
if [ $# -lt 2 ] || [[ ! $RESTARTS =~ ^([0-9]{1,4}|none)$ ]]; then
    echo "Usage Help: sbatch run_slurm.sh [--max_restarts N] CONFIG MODE [section.key=value ...]" >&2
    exit 2
fi
CONFIG=$1 MODE=$2
shift 2

# Slurm runs a copy of this file from its own folder, so the repository is where the job was submitted.
ROOT=${GPT2_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
if [ ! -f "$ROOT/scripts/environment.sh" ]; then
    echo "error: $ROOT is not the repository; submit from there, or set GPT2_ROOT=/path/to/it" >&2
    exit 2
fi
# shellcheck source=scripts/environment.sh
source "$ROOT/scripts/environment.sh"
use_python

# cpus-per-task is not handed on to srun by every version of Slurm.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}
if [ "$RESTARTS" != none ]; then
    RANKS=${SLURM_NTASKS_PER_NODE:-}
    if [ -z "$RANKS" ]; then
        echo "error: SLURM_NTASKS_PER_NODE is not set; give sbatch --ntasks-per-node, the number of ranks on a node" >&2
        exit 2
    fi
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_ON_NODE:-$((RANKS * SRUN_CPUS_PER_TASK))} PYTHON
    exec srun --ntasks="${SLURM_NNODES:-1}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        bash "$ROOT/scripts/run_distribute.sh" --max_restarts "$RESTARTS" none "$CONFIG" "[0,$RANKS]" "$MODE" "$@"
fi
exec srun --kill-on-bad-exit=1 "$PYTHON" "$ROOT/run_gpt2.py" --config "$CONFIG" --run_mode "$MODE" "$@"
