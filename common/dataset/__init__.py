"""Path of the data from text over token files to batches, the arrays that a backend turns into
tensors.
"""

from common.config.split import parse_split
from common.dataset.blend import Blend, open_samples, parse_blend, require_data
from common.dataset.indexed import IndexedDataset, token_dtype
from common.dataset.indexed_writer import IndexedWriter
from common.dataset.metadata import Metadata
from common.dataset.prefetch import Prefetch
from common.dataset.sampler import Batch, ShardedSampler, Tokens, ordered_batches
from common.dataset.samples import GPTDataset, Samples
from common.dataset.split import Split

__all__ = [
    "Batch",
    "Blend",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Metadata",
    "Prefetch",
    "Samples",
    "ShardedSampler",
    "Split",
    "Tokens",
    "open_samples",
    "ordered_batches",
    "parse_blend",
    "parse_split",
    "require_data",
    "token_dtype",
]
