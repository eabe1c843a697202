"""Names of the parameters in other formats: against transformers, megatron-core, written-out lists
and the formulas of their layouts.
"""

import numpy as np
import pytest

from common.config.schema import ModelConfig
from common.systems.fleetx import read as fleetx
from common.systems.hugging_face import weights as hugging_face
from common.systems.megatron import shards as megatron
from common.systems.mindformers import read as mindformers
from common.systems.name_map import Fusion, NameMap, NameRow
from common.weights.names import parameter_shapes
from tests.common.systems.tiny_weights import random_arrays

NAME_MAPS = {
    "hf": hugging_face.NAME_MAPS, "fleetx": fleetx.NAME_MAPS,
    **mindformers.NAME_MAPS, **megatron.NAME_MAPS,
}  # fmt: skip
SIZES = {"num_layers": 2, "hidden_size": 12, "num_heads": 3, "seq_length": 7, "vocab_size": 11}
MODEL = ModelConfig(**SIZES, ffn_hidden_size=20, max_positions=9)


EVERY_MAP = [
    pytest.param(name_map, id=f"{name}-{number}")
    for name, maps in NAME_MAPS.items()
    for number, name_map in enumerate(maps)
]


@pytest.mark.parametrize("name_map", EVERY_MAP)
def test_every_parameter_has_one_place(name_map: NameMap) -> None:
    rows = name_map.rows(MODEL.num_layers)
    assert sorted(name for row in rows for name in row.ours) == sorted(parameter_shapes(MODEL))
    assert len({row.theirs for row in rows}) == len(rows)
    assert not any(name_map.ignores(row.theirs) for row in rows)


def test_causal_masks_of_old_files_are_ignored() -> None:
    for name_map, prefix in zip(NAME_MAPS["hf"], ("transformer.", ""), strict=True):
        assert all(name_map.ignores(f"{prefix}h.3.attn.{name}") for name in ("bias", "masked_bias"))
        assert not name_map.ignores(f"{prefix}h.3.attn.c_attn.bias") and not name_map.ignores(
            f"other.{prefix}h.3.attn.bias"
        )


MINDFORMERS = """
backbone.blocks.1.layernorm1.gamma 12 | h.1.ln_1.weight
backbone.blocks.1.layernorm1.beta 12 | h.1.ln_1.bias
backbone.blocks.1.layernorm2.gamma 12 | h.1.ln_2.weight
backbone.blocks.1.layernorm2.beta 12 | h.1.ln_2.bias
backbone.blocks.1.attention.projection.weight 12x12 T | h.1.attn.c_proj.weight
backbone.blocks.1.attention.projection.bias 12 | h.1.attn.c_proj.bias
backbone.blocks.1.attention.dense1.weight 12x12 | h.1.attn.q_proj.weight
backbone.blocks.1.attention.dense1.bias 12 | h.1.attn.q_proj.bias
backbone.blocks.1.attention.dense2.weight 12x12 | h.1.attn.k_proj.weight
backbone.blocks.1.attention.dense2.bias 12 | h.1.attn.k_proj.bias
backbone.blocks.1.attention.dense3.weight 12x12 | h.1.attn.v_proj.weight
backbone.blocks.1.attention.dense3.bias 12 | h.1.attn.v_proj.bias
backbone.blocks.1.output.mapping.weight 12x20 T | h.1.mlp.c_fc.weight
backbone.blocks.1.output.mapping.bias 20 | h.1.mlp.c_fc.bias
backbone.blocks.1.output.projection.weight 20x12 T | h.1.mlp.c_proj.weight
backbone.blocks.1.output.projection.bias 12 | h.1.mlp.c_proj.bias
backbone.layernorm.gamma 12 | ln_f.weight
backbone.layernorm.beta 12 | ln_f.bias
backbone.embedding.word_embedding.embedding_table 11x12 | wte.weight
backbone.embedding.position_embedding.embedding_table 9x12 | wpe.weight
"""


@pytest.mark.parametrize("release", ["mindformers", "mindformers_r0.3"])
def test_mindformers_has_these_names(release: str) -> None:
    """From its sources r0.6 to r1.5; r0.3 put two names under another prefix, and not the
    embeddings.
    """
    parameters, (name_map,) = random_arrays(MODEL), NAME_MAPS[release]
    found = {
        row.theirs: row.pack([parameters[name] for name in row.ours], MODEL.num_heads)
        for row in name_map.rows(MODEL.num_layers)
    }
    assert len(found) == 16 * 2 + 4
    for line in MINDFORMERS.strip().splitlines():
        (name, shape, *transposed), (ours,) = (part.split() for part in line.split(" | "))
        if release == "mindformers_r0.3":
            name = name.replace("backbone.blocks", "gpt2.backbone.transformer.encoder.blocks")
            name = name.replace("backbone.layernorm.", "gpt2.backbone.layernorm.")
        assert found[name].shape == tuple(map(int, shape.split("x")))
        expected = parameters[ours].T if transposed else parameters[ours]
        np.testing.assert_array_equal(found[name], expected)


# where row r of output d of head h lies, with 4 outputs a head and 3 heads: Megatron-LM's
# checkpoint versions 0, 1 and 2
PLACES = {
    Fusion.BLOCKS: lambda part, head, output: part * 12 + head * 4 + output,
    Fusion.OUTPUTS: lambda part, head, output: (head * 4 + output) * 3 + part,
    Fusion.HEADS: lambda part, head, output: head * 12 + part * 4 + output,
}


@pytest.mark.parametrize("fusion", list(Fusion))
def test_rows_of_query_key_and_value_lie_where_the_formula_says(fusion: Fusion) -> None:
    parts = [np.random.default_rng(part).standard_normal((12, 5), np.float32) for part in range(3)]
    row = NameRow(ours=("q", "k", "v"), theirs="qkv", fusion=fusion)
    found = row.pack(parts, 3)
    for part, head, output in np.ndindex(3, 3, 4):
        place = PLACES[fusion](part, head, output)
        np.testing.assert_array_equal(found[place], parts[part][head * 4 + output])
    pieces = row.pieces(parts, 3)
    assert b"".join(piece.tobytes() for piece in pieces) == found.tobytes()
    for piece in pieces if fusion is not Fusion.OUTPUTS else ():
        assert any(np.shares_memory(piece, values) for values in parts)
