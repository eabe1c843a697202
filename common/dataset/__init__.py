"""Path of the data from text over token files to batches, the arrays that a backend turns into tensors."""

from common.config.values import parse_split
from common.dataset.blend import Blend, open_samples, parse_blend, part_names, require_data, windows_by_part
from common.dataset.indexed import IndexedDataset, IndexedWriter, token_dtype
from common.dataset.metadata import Metadata
from common.dataset.sampler import Batch, Prefetch, ShardedSampler, Tokens, ordered_batches
from common.dataset.samples import EmptySplitError, GPTDataset, Samples, Split

__all__ = [
    "Batch",
    "Blend",
    "EmptySplitError",
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
    "part_names",
    "require_data",
    "token_dtype",
    "windows_by_part",
]
