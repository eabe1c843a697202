# shellcheck shell=bash
# The Ascend ModelZoo's environment of a training on NPUs. To be sourced. A machine without CANN is left as it is, and what is set
# already stays. HCCL_IF_IP is left to the launcher, which knows the address that leads to the other hosts.
for file in "${ASCEND_TOOLKIT_HOME:-}/set_env.sh" /usr/local/Ascend/ascend-toolkit/set_env.sh "$HOME/Ascend/ascend-toolkit/set_env.sh"; do
    if [[ -f "$file" ]]; then
        # shellcheck source=/dev/null
        source "$file"
        export ASCEND_SLOG_PRINT_TO_STDOUT="${ASCEND_SLOG_PRINT_TO_STDOUT:-0}" ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
        export ASCEND_GLOBAL_EVENT_ENABLE="${ASCEND_GLOBAL_EVENT_ENABLE:-0}" TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
        export COMBINED_ENABLE="${COMBINED_ENABLE:-1}" HCCL_WHITELIST_DISABLE="${HCCL_WHITELIST_DISABLE:-1}"
        export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}" HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-1200}"
        ulimit -SHn 512000 2>/dev/null || true # open files; without the right to raise the limit it stays
        break
    fi
done
