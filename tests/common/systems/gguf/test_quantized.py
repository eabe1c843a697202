"""Quantized GGUF, opened to compute with: what gguf itself makes of the blocks, under our names."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from common.systems.gguf.read import open_gguf, open_to_compute
from common.systems.hugging_face.read import open_hugging_face
from tools.convert_weight import main


@pytest.mark.parametrize(("dtype", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_blocks_become_the_numbers_they_stand_for(tmp_path: Path, dtype: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "hf")
    words = ["--input", str(tmp_path / "hf"), "--output", str(tmp_path / "gguf"), "--dtype", dtype]
    assert main(["--to", "gguf", *words]) == 0
    block = gguf.GGMLQuantizationType[kind]
    with open_hugging_face(tmp_path / "hf") as exact, open_to_compute(tmp_path / "gguf") as found:
        assert kind in found.ignored["precision"]
        for name, weight in found.tensors.items():
            expected = np.ascontiguousarray(exact.tensors[name].load())
            if expected.ndim == 2 and name != "wpe.weight":
                stored = gguf.quants.quantize(expected, block)
                expected = gguf.quants.dequantize(stored, block)
            assert weight.dtype == "float32" and np.array_equal(weight.load(), expected), name
    with (
        pytest.raises(Exception, match="as a quantized model's"),
        open_gguf(tmp_path / "gguf"),
    ):
        pass
