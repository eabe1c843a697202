"""What the forward pass of one micro batch leaves for its backward pass, in bytes: the tensors that
torch_gpt2/model.py and torch_gpt2/loss.py make autograd keep, counted as an accelerator keeps them
(fused attention, one byte an element of a dropout mask).

Tensor parallel is Megatron's (arXiv 1909.08053, section 3). With sequence parallel (arXiv
2205.05198, section 4.2.2) what lies between its regions is split too; the input of a region is
gathered, and kept so.
"""

from __future__ import annotations

from common.parallel.resolved_run import ResolvedRun

LOSS_ROWS = 1024
"""Positions whose logits exist at one time: torch_gpt2.loss.ROWS_AT_ONCE."""


def of_block(config: ResolvedRun, recompute: str) -> int:
    """Of one transformer block, recomputing nothing (none), attention and the MLP's inner part
    (selective), or all of it (full).
    """
    s = config.sizes
    if recompute == "full":
        return s.residual
    hidden = s.hidden
    kept = 2 * (of_norm(config) + s.region)  # both norms, their outputs
    kept += s.inner + (0 if recompute == "selective" else s.inner)  # c_fc's output, gelu's
    kept += 4 * s.heads_part + (0 if recompute == "selective" else _attention(config))
    if config.model.hidden_dropout:
        kept += 2 * s.mask
    if s.held != s.compute:  # weights as they were multiplied: q, k, v and both c_proj, c_fc
        matrices = 4 * hidden * hidden + (1 if recompute == "selective" else 2) * hidden * s.ffn
        kept += matrices * s.compute // s.tensor
    return kept


def of_norm(config: ResolvedRun) -> int:
    """Its input in its own type, mean and deviation, and weight and bias where they are held in
    another type.
    """
    s = config.sizes
    weights = 2 * s.hidden * s.norm if s.norm != s.held else 0
    return (s.tokens * s.hidden + 2 * s.tokens) * s.norm // s.between + weights


def _attention(config: ResolvedRun) -> int:
    """Beside q, k, v and the output: fused, the logarithm of each row's sum; written out, the
    probabilities (model.Attention.attend).
    """
    s = config.sizes
    rows = s.tokens * s.heads // s.tensor
    if config.precision.softmax == "float32":
        return rows * 4
    products = rows * s.seq_length
    kept = products * s.softmax + s.seq_length * s.seq_length  # softmax's output, the causal mask
    if config.precision.softmax != config.precision.compute:
        kept += products * s.compute
    if config.model.attention_dropout:
        kept += products * (1 + s.compute)
    return kept


def of_embedding(config: ResolvedRun) -> int:
    """Token ids and positions, which are int64, and the dropout's mask."""
    s = config.sizes
    return 8 * (s.tokens + s.seq_length) + (s.mask if config.model.embedding_dropout else 0)


def of_loss(config: ResolvedRun) -> int:
    """Gradients that the forward pass has found already: of the hidden states, and of the head in
    float32.
    """
    s = config.sizes
    return s.region + 4 * s.vocabulary * s.hidden // s.tensor


def while_in_loss(config: ResolvedRun) -> int:
    """Most bytes that come and go in the loss. Forward, beside the head in the type of the
    computation: the float32 logits of LOSS_ROWS positions with as much for their logsumexp; or the
    product that adds to the head's gradient. Backward: that gradient times the loss scale.
    """
    s = config.sizes
    rows, shard = min(s.tokens, LOSS_ROWS), s.vocabulary // s.tensor
    head = shard * s.hidden * s.compute if s.held != s.compute else 0
    product = shard * s.hidden * s.compute + rows * shard * (4 + s.compute) if s.compute < 4 else 0
    return max(head + max(8 * rows * shard, product), 4 * shard * s.hidden)


def while_in_block(config: ResolvedRun) -> int:
    """Most bytes that come and go in a block's backward pass: what it recomputes, and the gradients
    on their way through the MLP.
    """
    s, mode = config.sizes, config.train.recompute
    again = of_block(config, "none") - of_block(config, mode) if mode != "none" else 0
    return max(0, again) + 2 * s.inner + 2 * s.region + s.tokens * s.hidden * s.norm // s.between
