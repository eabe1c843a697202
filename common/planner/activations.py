"""Bytes that the forward pass of one micro batch keeps for its backward pass.

They are the tensors that torch_gpt2/model.py and torch_gpt2/loss.py make autograd keep, operator by operator or in
compiled regions. They are counted as on an accelerator (fused attention, one byte per element of a dropout mask).
MindSpore's attention is counted as fused only where it is (common/parallel/kernels.py).

Tensor parallelism is Megatron's (arXiv 1909.08053, section 3). With sequence parallelism (arXiv 2205.05198, section
4.2.2) activations between its regions are split too. The input of a region is gathered, and kept so.
"""

from __future__ import annotations

from common.parallel.kernels import in_regions, is_compiled, keeps_no_scores, loss_rows
from common.parallel.run import Run


def block_bytes(config: Run, recompute: str) -> int:
    """Return the bytes of one transformer block.

    It recomputes nothing (none), attention and the MLP's inner part (selective), or all of it (full).
    """
    s = config.sizes
    if recompute == "full":
        return s.residual
    hidden = s.hidden
    kept = 2 * (norm_bytes(config) + s.region)  # both norms and their outputs
    kept += s.inner  # output of c_fc
    kept += 0 if recompute == "selective" else _activation_parts(config) * s.inner
    kept += 4 * (s.region // s.tensor) + (0 if recompute == "selective" else _attention(config))
    if config.model.hidden_dropout:
        kept += 2 * s.mask
    if (
        s.held != s.compute and not config.rounds_weights_once
    ):  # weights in the type of the products: q, k, v, both c_proj and c_fc
        matrices = 4 * hidden * hidden + (1 if recompute == "selective" else 2) * hidden * s.ffn
        kept += matrices * s.compute // s.tensor
    return kept


def _activation_parts(config: Run) -> int:
    """Return the tensors that the activation keeps: its output, and what is written operator by operator."""
    on_mindspore = config.backend == "mindspore"
    parts = {"gelu_new": 1, "gelu": 4 if on_mindspore else 1, "quick_gelu": 1 if on_mindspore else 2}
    return 1 if is_compiled(config, config.hardware) else parts[config.model.activation]


def blocks_bytes(config: Run, layers: int) -> int:
    """Return the bytes of this many blocks of one stage."""
    again = recomputed(config, layers)
    whole = (layers - again) * block_bytes(config, "none")
    return whole + again * block_bytes(config, config.train.recompute)


def recomputed(config: Run, layers: int) -> int:
    """Return the blocks that recompute, of this many in a stage."""
    train = config.train
    if train.recompute == "none":
        return 0
    return layers if train.recompute_layers is None else min(layers, train.recompute_layers)


def recomputed_of_rank(config: Run, place: int) -> int:
    """Return the blocks that recompute, in all stages of a pipeline rank."""
    topology, layers = config.topology, config.model.num_layers
    return sum(recomputed(config, len(topology.layers_of_stage(stage, layers))) for stage in topology.stages_of(place))


def norm_bytes(config: Run) -> int:
    """Return the bytes of a norm: its input, mean, deviation, and weight and bias held in another type."""
    s = config.sizes
    weights = 2 * s.hidden * s.norm if s.norm != s.held else 0
    kept = s.tokens * s.hidden * input_of_norm(config) + 2 * s.tokens * s.norm
    return kept // s.between + weights


def input_of_norm(config: Run) -> int:
    """Return the bytes of an element of a norm's input: of the norm's type, or where a graph
    converts it in the kernel, of the computation's.
    """
    return config.sizes.compute if has_regions(config) else config.sizes.norm


def has_regions(config: Run) -> bool:
    """Return whether regions of the model are compiled. One graph of all keeps more, as measured on
    an H100 (docs/h100.md), and is counted as if nothing were compiled.
    """
    return is_compiled(config, config.hardware) and in_regions(config)


def _attention(config: Run) -> int:
    """Return the bytes of attention beside q, k, v and the output.

    Fused attention keeps the logarithm of each row's sum. Attention written out keeps the
    probabilities (model.Attention.attend).
    """
    s = config.sizes
    rows = s.tokens * s.heads // s.tensor
    if keeps_no_scores(config, config.hardware):
        return rows * 4
    products = rows * s.seq_length
    kept = products * s.softmax + s.seq_length * s.seq_length  # softmax output, causal mask
    if config.precision.softmax != config.precision.compute:
        kept += products * s.compute
    if config.model.attention_dropout:
        kept += products * (1 + s.compute)
    return kept


def while_in_loss(config: Run) -> int:
    """Return the peak of temporary bytes in the loss.

    Forward, beside the head in the type of the computation: the float32 logits of ``train.loss_rows`` positions (those
    of a CPU if left out), and as much for their logsumexp, or the product that adds to the head's gradient. A compiled
    loss needs neither. Backward: that gradient times the loss scale.
    """
    s = config.sizes
    memory = None if config.hardware is None else config.hardware.memory
    rows = min(s.tokens, loss_rows(config, memory))
    shard = s.vocabulary // s.tensor
    head = shard * s.hidden * s.compute if s.held != s.compute else 0
    if config.precision.float8_head:  # two copies of a byte, of the hidden states too
        head = 2 * (shard + s.tokens) * s.hidden
    product = shard * s.hidden * s.compute + rows * shard * (4 + s.compute) if s.compute < 4 else 0
    logits = 4 * rows * shard if has_regions(config) else max(8 * rows * shard, product)
    return max(head + logits, 4 * shard * s.hidden)


def moments_in_blocks(config: Run, layers: int) -> list[tuple[int, int]]:
    """Return moments of the backward pass of a stage's blocks at which memory may be at its peak.

    Each is the bytes of activations that are free by then, and temporary bytes beside the rest:
    recomputed tensors, gradients of the MLP, and its tensors that come back from the host.
    """
    again = recomputed(config, layers)
    found = [(0, _while_in_block(config, "none"))] if again < layers else []
    if again:
        # the last blocks, which do not recompute, have gone backward
        free = 0 if config.train.offload_activations else (layers - again) * block_bytes(config, "none")
        found.append((free, _while_in_block(config, config.train.recompute)))
    return found


def _while_in_block(config: Run, mode: str) -> int:
    s = config.sizes
    again = block_bytes(config, "none") - block_bytes(config, mode) if mode != "none" else 0
    if config.train.offload_activations:
        again += {"none": 2 * s.inner, "selective": s.inner, "full": s.residual}[mode]
    return max(0, again) + 2 * s.inner + 2 * s.region + s.tokens * s.hidden * s.norm // s.between
