# shellcheck shell=bash
# Shared by train_full_8p.sh and train_performance_8p.sh. To be sourced.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../../.." && pwd)"

train_8p() {
    local iterations="$1" data_path="" size="345M" words=()
    shift
    for word in "$@"; do
        case "$word" in
            --data_path=*) data_path="${word#*=}" ;;
            --model_size=*) size="${word#*=}" ;;
            --train_iters=*) iterations="${word#*=}" ;;
            -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
            --*) echo "[Error] unknown argument $word; expected --data_path=, --model_size= or --train_iters=" >&2; exit 1 ;;
            *=*) words+=("$word") ;;
            *) echo "[Error] unknown argument $word; expected section.key=value" >&2; exit 1 ;;
        esac
    done
    if [[ -z "$data_path" ]]; then
        echo '[Error] para "data_path" must be confing: give --data_path=DIR' >&2
        exit 1
    fi
    local config
    case "$size" in
        345M) config=run_gpt2_345m_modelzoo ;;
        1.3B) config=run_gpt2_1.3b_modelzoo ;;
        2.7B) config=run_gpt2_2.7b ;;
        3.7B) config=run_gpt2_3.7b ;;
        345M_without_mp) config=run_gpt2_345m_modelzoo_without_mp ;;
        *) echo "Invalid model size. Please choose from: 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp" >&2; exit 1 ;;
    esac
    data_path="$(realpath -m "$data_path")"
    local log=test/output/0 start code=0
    source "$here/env_npu.sh"
    mkdir -p "$log"
    start=$(date +%s)
    # -i: at Ctrl-C the launcher still has to say that the ranks have saved
    bash "$root/scripts/run_distribute.sh" --log_dir "$log" none "$root/configs/gpt2/$config.yaml" "[0,${DEVICES:-8}]" train \
        data.train="$data_path/my-gpt_text_sentence" data.tokenizer.vocab_file="$data_path/gpt2-vocab.json" \
        data.tokenizer.merge_file="$data_path/gpt2-merges.txt" data.tokenizer.folder=null train.max_steps="$iterations" \
        parallel.data_parallel=null \
        output_dir=ckpts/ckpts_tmp logging.style=megatron logging.interval=100 validation.interval=1000 "${words[@]}" 2>&1 |
        tee -i "$log/train_0.log" || code=$?
    if ((code)); then
        echo "[Error] the training ended with exit code $code; see $log/train_0.log" >&2
        exit "$code"
    fi
    if ! grep -q "samples/sec" "$log/train_0.log"; then
        echo "no step of this run is in $log/train_0.log: no final result"
        return
    fi
    echo "------------------ Final result ------------------"
    echo "Final Performance samples/sec : $(grep "samples/sec" "$log/train_0.log" | tail -n 100 | awk '{sum+=$10} END {print sum/NR}')"
    echo "Final Train lm loss PPL(accuracy): $(grep "validation loss at iteration" "$log/train_0.log" |
        awk 'NR == 1 || $15 + 0 < least + 0 {least = $15} END {print NR ? least : "not measured"}')"
    echo "E2E Training Duration sec : $(($(date +%s) - start))"
}
