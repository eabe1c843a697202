"""Peak memory of a step whose parameters FSDP2 splits.

Blocks and the unit of all other parameters (embeddings and final norm) are communicated at
different times. So the peak is that of the fullest phase, not the sum of all buffers. Sizes are
those of an accelerator: below float32 a CPU also makes a float32 copy of the head's gradient.
"""

from __future__ import annotations

from common.parallel.run import BYTES, Run
from common.planner import activations


def peak_of_step(
    config: Run,
    *,
    layers: int,
    block: int,
    others: int,
    gathered: int,
    gradients: int,
    of_blocks: int,
    saved: int,
    in_loss: int,
) -> int:
    """Return the most bytes beside weights and optimizer, without a pipeline.

    ``layers`` is the number of blocks. ``block`` and ``others`` are elements of the units. The
    remaining sizes are bytes, as in Memory. ``of_blocks`` are the gradients of all blocks
    after their reduction.
    """
    sizes, zero = config.sizes, config.parallel.zero_stage
    several = config.train.accumulation_steps > 1
    held, reduced = BYTES[config.precision.parameters], BYTES[config.precision.reduction]
    summed = max(held, reduced)  # bytes of an element of the token table's gradient
    table = sizes.vocabulary * sizes.hidden // sizes.tensor * 4
    earlier = gradients if several else 0
    kept = others * held if zero == 3 else gathered
    loss = kept + saved + in_loss + activations.while_in_loss(config)
    # the message of one block is on its way while the next one goes backward; the last block
    # recomputes only if all do
    mode = config.train.recompute if activations.recomputed(config, layers) == layers else "none"
    sent = block * (held + reduced) - activations.block_bytes(config, mode)
    blocks = gathered + saved + table + activations.while_in_block(config, layers) + max(0, sent)
    # the blocks are reduced; the loss's gradient of the table meets that of the lookup
    copied = table * held // 4 if held < reduced else 0  # the lookup's, before its float32 copy
    lookup = gathered + 2 * table + copied + (0 if several else of_blocks)
    # only the last backward pass lets go of the parameters before it reduces
    still = gathered if several and zero == 2 else 0
    last = still + others * (summed + reduced) + (0 if several else of_blocks)
    return max(loss, blocks, lookup, last) + earlier
