"""All private interfaces of DeepSpeed that this engine uses.

They were read in DeepSpeed 0.19.8; the package accepts 0.19.8 to 0.20. ``tests/torch_gpt2/test_private_api.py`` names
an interface that is gone. ``PRIVATE`` gives the purpose of each, and the public way that would replace it.
"""

from __future__ import annotations

import importlib
from typing import Any

_LINKING = "_lazy_init_hp_params_optimizer_state"
PRIVATE = {
    "deepspeed.comm.comm.cdb": "the communication backend that an earlier run of this process has"
    " left; no public replacement: one run a process",
    "deepspeed.utils.groups._release_process_group_references": "the groups that it has left;"
    " same reason as the entry above",
    "deepspeed.ops.__compatible_ops__": "which kernels may be compiled at first use; publicly"
    " DS_BUILD_OPS, read when DeepSpeed is installed, not when it runs",
    f"deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.{_LINKING}": "linking moments to"
    " parameters again; no public replacement: safe_get_full_optimizer_state trusts the first link",
    f"deepspeed.runtime.bf16_optimizer.BF16_Optimizer.{_LINKING}": "same reason as the entry above",
}
"""Purpose of each name, and its public replacement."""


def forget_groups(deepspeed: Any) -> None:
    """Drop the process groups that an earlier run of this process has left in DeepSpeed."""
    deepspeed.comm.comm.cdb = None
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references()


def leave_out_shared_memory(deepspeed: Any) -> None:
    """Prevent the compilation of the faster all-reduce for CPUs."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_float16(deepspeed: Any) -> None:
    """Let DeepSpeed accept float16 on any CPU, as torch does.

    By default it requires a CPU that multiplies float16 in hardware.
    """
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def link_moments(optimizer: Any) -> None:
    """Let the optimizers of ZeRO 1 and 2 link moments to parameters again.

    They do so once, after the first parameter group has made its first step. It must be repeated
    when the other group has stepped too. Other optimizers are not changed.
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
