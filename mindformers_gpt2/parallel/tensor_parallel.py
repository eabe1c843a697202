"""Tensor parallel, applied to a model from outside (Megatron-LM, arXiv 1909.08053 section 3).

Between the split regions every rank of the group has all activations (B, T, C). At the entry of a
region its input is copied. At the exit its partial results are summed.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from common.parallel.sharding import Role, local_shape, role_of
from mindformers_gpt2.layers import Embedding, empty
from mindformers_gpt2.loss import CrossEntropySum, VocabularyShard
from mindformers_gpt2.model import GPT2, LayerNorm, Linear
from mindformers_gpt2.parallel.collectives import Group, all_reduce


class Enter(nn.Cell):
    """Entry of a region whose weights are split. Its gradient is the sum of the ranks' gradients."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.all_reduce = all_reduce(group)

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, slope: Tensor) -> tuple[Tensor]:
        return (self.all_reduce(slope),)


class Leave(nn.Cell):
    """Exit of a region: the sum of the ranks' partial results."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.all_reduce = all_reduce(group)

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)

    def bprop(self, x: Tensor, out: Tensor, slope: Tensor) -> tuple[Tensor]:
        return (slope,)


class RowLinear(Linear):
    """Linear layer with weights (out, in / group). Results are summed over the group before the bias is added.

    Every rank has the whole bias.
    """

    leave: Leave

    def construct(self, x: Tensor) -> Tensor:
        shape = x.shape
        product = self.leave(self.matmul(*self.operands(x)))
        return self.add(product, ops.cast(self.bias, x.dtype)).reshape((*shape[:-1], self.out_features))


class VocabularyEmbedding(Embedding):
    """Embedding with the rows of this rank's tokens.

    Tokens of other ranks give zero, and the sum over the group has all rows.
    """

    leave: Leave
    first: int
    rows: int

    def construct(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        here = ops.logical_and(local >= 0, local < self.rows)
        found = self.gather(self.weight, local * ops.cast(here, ms.int32), 0)
        return self.leave(found * ops.expand_dims(ops.cast(here, found.dtype), -1))


def split_model(model: GPT2, group: Group) -> None:
    """Replace each parameter of a model without memory by this rank's part, and connect the regions.

    Hooks enter the regions. Inside them a Cell gets another class, for two reasons. A hook after it would see its
    result with the bias. A new Cell would need the name, type and marks of the old one.
    """
    for _, cell in list(model.cells_and_names()):
        for part, parameter in list(cell.parameters_and_names(expand=False)):
            # the name in the whole model, of which this may be a stage
            name = parameter.name
            setattr(cell, part, empty(name, local_shape(name, tuple(parameter.shape), group.size)))
            if part == "weight" and isinstance(cell, Linear):
                cell.out_features, cell.in_features = cell.weight.shape
                if role_of(name) is Role.ROW:
                    cell.__class__, cell.leave = RowLinear, Leave(group)
            elif role_of(name) is Role.VOCABULARY:
                cell.__class__, cell.leave = VocabularyEmbedding, Leave(group)
                cell.rows = cell.weight.shape[0]
                cell.first = group.rank * cell.rows
                model.cross_entropy = CrossEntropySum(
                    model.config.vocab_size, VocabularyShard(group=group, first=cell.first)
                )
    enter = Enter(group)

    def enter_before(_: nn.Cell, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (enter(inputs[0]), *inputs[1:])

    def enter_behind(_: nn.Cell, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return enter(output)

    for block in model.h:
        block.attn.heads //= group.size
        for region in (block.attn, block.mlp):
            region.register_forward_pre_hook(enter_before)
    if isinstance(model.ln_f, LayerNorm):
        model.ln_f.register_forward_hook(enter_behind)
