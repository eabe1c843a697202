"""What the forward pass of one micro batch leaves for its backward pass, in bytes: the tensors that torch_gpt2/model.py and
torch_gpt2/loss.py make autograd keep, counted as an accelerator keeps them (fused attention, one byte an element of a dropout mask).

Tensor parallel is Megatron's (arXiv 1909.08053, section 3). With sequence parallel (arXiv 2205.05198, section 4.2.2) what lies between
its regions is split too; the input of a region is gathered, and kept so.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config.schema import RunConfig
from common.parallel.sharding import padded_vocabulary

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOSS_ROWS = 1024
"""Positions whose logits exist at one time: torch_gpt2.loss.ROWS_AT_ONCE."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that the formulas below are made of; types in bytes. Needs a resolved config."""

    tokens: int
    seq_length: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    tensor: int
    between: int
    """Ranks that split what lies between tensor-parallel regions: all with sequence parallel, else 1."""
    held: int
    compute: int
    norm: int
    softmax: int

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        model, precision, tensor = config.model, config.precision, config.parallel.model_parallel
        assert model.ffn_hidden_size is not None and config.train.micro_batch_size is not None
        return cls(
            tokens=config.train.micro_batch_size * model.seq_length,
            seq_length=model.seq_length,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_heads,
            vocabulary=padded_vocabulary(config),
            tensor=tensor,
            between=tensor if config.parallel.sequence_parallel else 1,
            held=BYTES[precision.parameters],
            compute=BYTES[precision.compute],
            norm=BYTES[precision.layer_norm],
            softmax=BYTES[precision.softmax],
        )

    @property
    def residual(self) -> int:
        """The stream between blocks, which is what stages send each other too."""
        return self.tokens * self.hidden * self.compute // self.between

    @property
    def region(self) -> int:
        """The input of attention or MLP, whole on each rank."""
        return self.tokens * self.hidden * self.compute

    @property
    def heads_part(self) -> int:
        """q, k, v, or the attention's output: this rank's heads."""
        return self.region // self.tensor

    @property
    def inner(self) -> int:
        """One tensor of the MLP's inner width."""
        return self.tokens * self.ffn * self.compute // self.tensor

    @property
    def mask(self) -> int:
        """Of the dropout of a residual branch."""
        return self.tokens * self.hidden // self.between


def of_block(config: RunConfig, recompute: str) -> int:
    """Of one transformer block, recomputing nothing (none), attention and the MLP's inner part (selective), or all of it (full)."""
    s = Sizes.of(config)
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


def of_norm(config: RunConfig) -> int:
    """Its input in its own type, mean and deviation, and weight and bias where they are held in another type."""
    s = Sizes.of(config)
    weights = 2 * s.hidden * s.norm if s.norm != s.held else 0
    return (s.tokens * s.hidden + 2 * s.tokens) * s.norm // s.between + weights


def _attention(config: RunConfig) -> int:
    """Beside q, k, v and the output: fused, the logarithm of each row's sum; written out, the probabilities (model.Attention.attend)."""
    s = Sizes.of(config)
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


def of_embedding(config: RunConfig) -> int:
    """Token ids and positions, which are int64, and the dropout's mask."""
    s = Sizes.of(config)
    return 8 * (s.tokens + s.seq_length) + (s.mask if config.model.embedding_dropout else 0)


def of_loss(config: RunConfig) -> int:
    """Gradients that the forward pass has found already: of the hidden states, and of the head in float32."""
    s = Sizes.of(config)
    return s.region + 4 * s.vocabulary * s.hidden // s.tensor


def while_in_loss(config: RunConfig) -> int:
    """Most bytes that come and go in the loss. Forward, beside the head in the type of the computation: the float32 logits of LOSS_ROWS
    positions with as much for their logsumexp; or the product that adds to the head's gradient. Backward: that gradient times the loss
    scale."""
    s = Sizes.of(config)
    rows, shard = min(s.tokens, LOSS_ROWS), s.vocabulary // s.tensor
    head = shard * s.hidden * s.compute if s.held != s.compute else 0
    product = shard * s.hidden * s.compute + rows * shard * (4 + s.compute) if s.compute < 4 else 0
    return max(head + max(8 * rows * shard, product), 4 * shard * s.hidden)


def while_in_block(config: RunConfig) -> int:
    """Most bytes that come and go in a block's backward pass: what it recomputes, and the gradients on their way through the MLP."""
    s, mode = Sizes.of(config), config.train.recompute
    again = of_block(config, "none") - of_block(config, mode) if mode != "none" else 0
    return max(0, again) + 2 * s.inner + 2 * s.region + s.tokens * s.hidden * s.norm // s.between
