"""Write a GGUF file with the weights, the sizes and the tokenizer of a GPT-2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, TokenizerError
from common.log import LOG
from common.paths import require_package
from common.systems.name_map import name_map
from common.systems.weights import Weights, arrays_of, export_names, require_blocks
from common.tensor_files.arrays import contiguous
from common.tensor_files.checksummed import file_checksum
from common.tokenizer import kind_of_files
from common.tokenizer.bpe_files import read_vocabulary
from common.tokenizer.folder import Folder, vocabulary_in
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer, files_in
from common.weights.names import EMBEDDING, POSITIONS

FILE = "model.gguf"
_IN_BLOCK = "blk.{layer}."

NAME_MAP = name_map(
    {
        EMBEDDING: "token_embd.weight",
        POSITIONS: "position_embd.weight",
        "ln_f": "output_norm",
        "ln_1": f"{_IN_BLOCK}attn_norm",
        "attn.qkv_proj": f"{_IN_BLOCK}attn_qkv",
        "attn.c_proj": f"{_IN_BLOCK}attn_output",
        "ln_2": f"{_IN_BLOCK}ffn_norm",
        "mlp.c_fc": f"{_IN_BLOCK}ffn_up",
        "mlp.c_proj": f"{_IN_BLOCK}ffn_down",
    }
)
"""llama.cpp's names. Weights are (out, in). Without a head, the embedding serves as one."""
_TYPES = {"float32": "F32", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""The type of matrices by dtype. Norms, biases and positions are float32 in all files."""


def write_gguf(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write FILE, a tensor at a time; returns its CRC-32.

    dtype: float32 when left out, float16, int8 (Q8_0) or int4 (Q4_0). The tokenizer is that of
    vocab.json and merges.txt in ``folder``. Raises ConfigError where the sizes do not suit the
    dtype, and TokenizerError; OSError is left to the caller.
    """
    require_package("gguf", extra="export", purpose="which writes GGUF")
    import gguf

    model, kind = weights.model, _TYPES[dtype or "float32"]
    if model.activation != "gelu_new":
        raise ConfigError(f"model.activation={model.activation}: GGUF means gelu_new; write safetensors or ONNX")
    if kind.startswith("Q"):
        require_blocks(model, str(dtype), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])
    writer = gguf.GGUFWriter(folder / FILE, "gpt2")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("gpt2")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.ffn_hidden_size)
    writer.add_head_count(model.num_heads)
    writer.add_layer_norm_eps(model.layer_norm_epsilon)
    writer.add_vocab_size(model.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, folder, model.vocab_size)
    tensors = export_names(NAME_MAP, weights.tensors, model, "float32")
    matrices = [name for name in tensors if name.endswith(".weight") and "norm" not in name]
    matrices.remove("position_embd.weight")
    types = {name: gguf.GGMLQuantizationType[kind if name in matrices else "F32"] for name in tensors}
    for name, tensor in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[types[name]]
        bytes_stored = tensor.nbytes // 4 // block * size
        writer.add_tensor_info(name, tensor.shape, np.dtype("float32"), bytes_stored, raw_dtype=types[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, array in zip(tensors, arrays_of(tensors), strict=True):
            writer.write_tensor_data(gguf.quants.quantize(contiguous(array), types[name]).view(_Written))
    finally:
        writer.close()
    with (folder / FILE).open("rb") as file:
        os.fsync(file.fileno())  # before the folder is renamed to its final name
    return {FILE: file_checksum(folder / FILE)}


class _Written(np.ndarray[Any, Any]):
    """Array whose writing reports a full disk as such. numpy's own error names only the elements written."""

    def tofile(self, file: Any, *_: Any) -> None:
        file.write(self.data)


def _add_tokenizer(writer: Any, folder: Path, rows: int) -> None:
    """Add the tokenizer in ``folder``. rows: of the embedding, which has a token for each.

    Types of tokens and keys are those of llama.cpp's convert_hf_to_gguf.py, and its llama-vocab.cpp
    stops at the ids of eos, eot and eom.
    """
    import gguf

    if not vocabulary_in(folder) or kind_of_files(None, folder, None) != GPT2BPETokenizer.kind:
        LOG.warning(
            f"{FILE} holds no tokenizer, so llama.cpp takes ids of tokens instead of text: only a byte-level BPE"
            " (vocab.json and merges.txt, or a tokenizer.json of this kind) has the same form there"
        )
        writer.add_tokenizer_model("none")
        return
    vocabulary = read_vocabulary(*files_in(folder))
    marks, end = vocabulary.marks, vocabulary.framing.suffix[-1]
    if max(len(vocabulary.ids), end + 1) > rows:
        raise TokenizerError(
            f"the tokenizer has {marks.size} tokens, and the model has {rows}; put the tokenizer of"
            " the model beside its weights"
        )
    tokens = [f"[PAD{row}]" for row in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    for text, number in vocabulary.ids.items():
        tokens[number], types[number] = text, gguf.TokenType.NORMAL
    for mark in (mark for mark in marks.marks if mark.id < rows):
        kind = gguf.TokenType.CONTROL if mark.special else gguf.TokenType.USER_DEFINED
        tokens[mark.id], types[mark.id] = mark.text, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in vocabulary.merges])
    writer.add_bos_token_id(end if marks.bos_id is None else marks.bos_id)
    ends = [each for each in marks.ends if each < rows] or [end]
    stops = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for number, add in zip(ends, stops, strict=False):
        add(number)
    writer.add_pad_token_id(marks.pad_id if marks.pad_id in range(rows) else end)
    writer.add_add_bos_token(bool(vocabulary.framing.begin))
    if template := Folder(folder).chat_template:
        writer.add_chat_template(template)
    for lost, why in (
        (ends[len(stops) :], f"llama.cpp stops at {len(stops)} ends; those after are left out"),
        (vocabulary.prefix_space, "llama.cpp puts no space before a text, as this tokenizer does"),
    ):
        if lost:
            LOG.warning(f"{FILE}: {why}")
