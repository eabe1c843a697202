"""Weights of Megatron-DeepSpeed's checkpoints (``deepspeed``), of any tensor and pipeline size, and
of ZeRO 0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.systems.deepspeed.files import args_of, find_folder, open_checkpoint
from common.systems.megatron_args import in_version, model_of_args
from common.systems.name_map import Fusion, name_map
from common.systems.rank_parts import join_ranks, read_joined
from common.systems.strangers import UNDER_DEEPSPEED
from common.systems.weights import Weights, weights_from
from common.weights.names import EMBEDDING, POSITIONS

_BLOCK = "layers.{layer}."
NAME_MAP = name_map(
    {
        EMBEDDING: "word_embeddings.weight",
        POSITIONS: "position_embeddings.weight",
        "ln_f": "final_layernorm",
        "ln_1": f"{_BLOCK}input_layernorm",
        "attn.qkv_proj": f"{_BLOCK}self_attention.query_key_value",
        "attn.c_proj": f"{_BLOCK}self_attention.dense",
        "ln_2": f"{_BLOCK}post_attention_layernorm",
        "mlp.c_fc": f"{_BLOCK}mlp.dense_h_to_4h",
        "mlp.c_proj": f"{_BLOCK}mlp.dense_4h_to_h",
    },
    fusion=Fusion.HEADS,
)
"""Names without the modules that hold the parameter, as files.py makes them."""


def detects(path: Path) -> bool:
    try:
        return find_folder(path) is not None
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return True


@contextmanager
def open_deepspeed(path: Path) -> Iterator[Weights]:
    """Open a checkpoint.

    path: the root with ``latest``, its folder global_stepN, or a file in that. Raises
    CheckpointError and ConfigError.
    """
    with open_checkpoint(path) as there:
        first = there.first
        if any(name.endswith(f".{POSITIONS}") for name in first):
            root = there.folder.parent
            raise CheckpointError(f"{path}: {UNDER_DEEPSPEED.format(root=root)}")
        names = in_version(first.path, first.tree.get("checkpoint_version", 0), NAME_MAP)
        ranks = [there.weights(tensor) for tensor in range(there.tensor)]
        table = names.global_rows[0].theirs
        rows = sum(rank[table].shape[0] for rank in ranks if table in rank and rank[table].shape)
        folders = (there.folder, there.folder.parent)
        model, notes = model_of_args(first.path, args_of(first), rows, there.tensor, folders)
        if step := first.tree.get("global_steps", first.tree.get("iteration", 0)):
            notes["optimizer"] = f"only weights are read, here of step {step}"
        of_names = {row.theirs: row for row in names.rows(model.num_layers)}
        yield weights_from(
            there.folder, names, join_ranks(there.folder, ranks, of_names), model,
            format="deepspeed", path=path, ignored=notes, read=read_joined,
        )  # fmt: skip
