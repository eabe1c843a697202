"""Private interfaces of torch's kernels and process groups that this backend uses.

Those of pipelining are in ``torch_gpt2/parallel/private_api.py``, since importing that package takes half a second.
They were read in torch 2.13.0. The package accepts 2.11 to 2.13, and a test names an interface that is gone.
``PRIVATE`` gives the purpose of each, and the public way that would replace it.
"""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

PRIVATE = {
    "torch.ops.mkldnn._reorder_linear_weight": "weights in oneDNN's own order, for products of few"
    " rows; publicly plain F.linear, half as fast for 8 rows, or torch.compile with frozen"
    " weights",
    "torch.ops.mkldnn._linear_pointwise": "the product with such weights; same reason as above",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether the CPU multiplies bfloat16 at full"
    " speed; publicly the flags of torch.cpu.get_capabilities, where a version has it",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "the same of float16",
    "torch._scaled_mm": "products in float8; publicly torch.nn.functional.scaled_mm, which torch"
    " 2.11's compiler does not know",
    "torch.ops.onednn.qlinear_prepack": "weights of 8 bits in oneDNN's own order; publicly F.linear"
    " on them as float32, half as fast, or torch.compile of what torchao quantizes",
    "torch.ops.onednn.qlinear_pointwise": "the product with such weights; same reason as above",
    "torch._dynamo.config.optimize_ddp": "graphs of regions under DDP, which would split them again"
    " at the borders of its buckets; no public replacement",
    "torch._inductor.config._micro_pipeline_tp": "messages of tensor parallelism during the"
    " products beside them; no public replacement",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "memory that the ranks of a"
    " group read from each other, which the compiler asks for by name; no public replacement",
    "torch._foreach_norm": "norms of all gradients in a few kernels; publicly"
    " torch.nn.utils.get_total_norm, which sums tensors of each type apart and so rounds differently",
    "torch._foreach_mul_": "all gradients times a factor in a few kernels; publicly a kernel a tensor",
    "torch._foreach_copy_": "all weights rounded in a few kernels; publicly a kernel a tensor",
    **dict.fromkeys(
        (
            "torch._foreach_add_",
            "torch._foreach_addcdiv_",
            "torch._foreach_addcmul_",
            "torch._foreach_div_",
            "torch._foreach_mul",
            "torch._foreach_sqrt",
        ),
        "a step of the optimizer that the device may skip, in a few kernels; publicly only"
        " torch.optim's fused optimizers, whose skip Ascend ignores",
    ),
    "torch._fused_adamw_": "a step of AdamW in a kernel per tensor, over state that other steps"
    " share; publicly torch.optim.AdamW, which keeps a count of updates per tensor",
    "torch.distributed.distributed_c10d.default_pg_timeout": "the limit of groups that are made"
    " without one, such as DeepSpeed's; publicly only new_group(timeout=...)",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether a device has this kernel, or would"
    " copy to the host and back; no public replacement",
}
"""Purpose of each name, and its public replacement."""


def limit_new_groups(limit: timedelta) -> None:
    """Let groups have this limit that are made without one.

    They do not have that of the group of all ranks: torch gives them 30 minutes.
    """
    dist.distributed_c10d.default_pg_timeout = limit


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a type at full speed on this CPU."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if dtype == torch.float32 or not available:
        return available
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_FEW = 16
"""Rows that weights are packed for. oneDNN's order is the same for 2 to 64 rows; its order for one
row reads a third slower, also for one.
"""


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a weight (out, in) into oneDNN's order for products with few rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _FEW)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b with a weight that ``pack_weight`` returned. All are of one type."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *, fast: bool = False
) -> Tensor:
    """Compute a product of float8 matrices (rows, n) and (n, columns), times both scales, in bfloat16.

    The left one has its rows in memory one after the other, the right one its columns. Scales are float32 scalars.
    fast: let tensor cores sum in fewer digits, for short sums.
    """
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


class PackedIntegers:
    """int8 weight (out, in) in oneDNN's own order."""

    def __init__(self, weight: Tensor) -> None:
        out, width = weight.shape
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [_FEW, width])
        self._ones, self._zeros = torch.ones(out), torch.zeros(out, dtype=torch.int32)

    def product(self, x: Tensor) -> Tensor:
        """Compute x W^T, summed in int32, as float32 (rows, out).

        x: whole float32 numbers (rows, in) from -128 to 127.
        """
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            x.to(torch.int8), 1.0, 0, self._packed, self._ones, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y


@cache
def multiplies_integers() -> bool:
    """Return whether products of ``PackedIntegers`` exist on this CPU and are exact.

    Kernels for processors without VNNI add pairs of products in 16 bits, which overflow for the
    largest ones. Sums of many products are more than float32 holds.
    """
    numbers = torch.randint(128, (8, 4096), generator=torch.Generator().manual_seed(0))
    large = torch.cat([numbers, -numbers, torch.full_like(numbers, 127)])
    try:
        found = PackedIntegers(large.to(torch.int8)).product(large.float())
    except RuntimeError:
        return False
    return torch.equal(found, (large @ large.t()).float())


def keep_graphs_whole() -> None:
    """Let torch.compile make one graph of what it is given, also under DDP."""
    torch._dynamo.config.optimize_ddp = False


ASYNC_TENSOR_PARALLEL = {"_micro_pipeline_tp": True}
"""Options of torch.compile that join gathers and scatters with the products beside them."""


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let compiled products of a group's ranks read each other's memory.

    torch 2.13 says that the call is not needed any more, but its compiler joins nothing without.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


foreach_norm, foreach_copy, foreach_multiply = torch._foreach_norm, torch._foreach_copy_, torch._foreach_mul_
"""Euclidean norms of tensors; copies of each source into its target; products in place."""


def foreach_momentum(
    weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], kept: Tensor, applied: Tensor, rate: float
) -> None:
    """Take a step of torch.optim.SGD in place. kept: share of the buffers that stays. applied: 1,
    or 0 for a step that leaves the weights. Without momentum the buffers are the gradients.
    """
    if buffers is not gradients:
        torch._foreach_mul_(buffers, kept)
        torch._foreach_add_(buffers, gradients)
    torch._foreach_add_(weights, torch._foreach_mul(buffers, applied), alpha=-rate)


def foreach_adam(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    *,
    betas: tuple[float, float],
    kept: tuple[Tensor, ...],
    epsilon: float,
    root: Tensor,
    rate: Tensor,
    decay: Tensor | None,
) -> None:
    """Take a step of torch.optim.Adam in place, or with decay of AdamW.

    kept: shares of the moments that stay. root: of the second moment's bias correction. rate: the
    learning rate over the first moment's; 0 leaves the weights. decay: factor of the weights.
    """
    if decay is not None:
        torch._foreach_mul_(weights, decay)
    torch._foreach_mul_(first, kept[0])
    torch._foreach_add_(first, gradients, alpha=1.0 - betas[0])
    torch._foreach_mul_(second, kept[1])
    torch._foreach_addcmul_(second, gradients, gradients, 1.0 - betas[1])
    divisors = torch._foreach_sqrt(second)
    torch._foreach_div_(divisors, root)
    torch._foreach_add_(divisors, epsilon)
    torch._foreach_div_(divisors, -rate)  # a rate of 0 makes them infinite
    torch._foreach_addcdiv_(weights, first, divisors)


def fused_adam(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    *,
    updates: int,
    betas: tuple[float, float],
    epsilon: float,
    rate: float,
    decay: float,
) -> None:
    """Take a step of torch.optim.AdamW in place, by a kernel per tensor that nothing can skip.

    updates: number of updates with this one. The kernel would compute its bias corrections in
    float32, which are 3e-5 off at first. At its last step they are 1, and rate, decay and epsilon
    have ours in them. They are those of the betas as the kernel has them.
    """
    first_beta, second_beta = torch.tensor(betas, dtype=torch.float32).tolist()
    root = math.sqrt(1.0 - second_beta**updates)
    correction = root / (1.0 - first_beta**updates)
    last = torch.full((), _LAST_STEP, device=weights[0].device)
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
        [last] * len(weights),
        lr=rate * correction,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay / correction,
        eps=epsilon * root,
        amsgrad=False,
        maximize=False,
    )


_LAST_STEP = 2.0**30
"""Step at which the power of every float32 below 1 is 0."""

_PROBE_TOLERANCE = 5e-5
"""Relative error that the probe allows. 1 - beta of a float32 is 1e-5 off, another formula 1e-2."""


def has_adam_kernel(device: torch.device) -> bool:
    """Return whether ``fused_adam`` runs on an accelerator that came with a package of its own.

    Three small updates must be those of the formula. An operator that this package lacks would be computed on the host.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "PrivateUse1"):
        return False
    rate, betas, epsilon, decay = 0.01, (0.9, 0.999), 1e-8, 0.1
    weight = torch.linspace(-0.1, 0.1, 64, dtype=torch.float64)
    gradients = [torch.cos(weight * 70.0 + step) for step in range(3)]
    plain = torch.optim.AdamW([weight], rate, betas, epsilon, decay, foreach=False, fused=False)
    held = [each.to(device, torch.float32) for each in (weight, *[torch.zeros_like(weight)] * 2)]
    try:
        for step, gradient in enumerate(gradients, 1):
            lists = [[each] for each in (held[0], gradient.to(device, torch.float32), *held[1:])]
            fused_adam(*lists, updates=step, betas=betas, epsilon=epsilon, rate=rate, decay=decay)
        found = [tensor.cpu().double() for tensor in held]
    except (RuntimeError, TypeError):
        return False
    for gradient in gradients:
        weight.grad = gradient
        plain.step()
    wanted = weight, plain.state[weight]["exp_avg"], plain.state[weight]["exp_avg_sq"]
    scales = (rate, 1.0, 3.0 * (1.0 - betas[1]))
    return all(
        torch.allclose(one, other, rtol=0.0, atol=_PROBE_TOLERANCE * scale)
        for one, other, scale in zip(found, wanted, scales, strict=True)
    )
