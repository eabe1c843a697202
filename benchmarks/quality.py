"""Measure loss and size of a trained model in every format that this toolkit writes.

    python benchmarks/quality.py --config output/quickstart/config.yaml [section.key=value ...]

The loss is that of the validation windows of its own data. The converter writes the formats.
onnxruntime reads ONNX, and the library gguf the blocks of GGUF. Needs the extras torch and export.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.table import print_table
from common.flags import flag, parse

Loss = Callable[[Any, Any], float]
"""(ids (B, T), targets (B, T)) -> the summed loss, in nats."""

OWN_INT8 = "our own, int8"
QDQ = "ONNX of our own int8, QuantizeLinear"
FORMATS = (
    ("our own, float32", "torch_gpt2", "float32"),
    (OWN_INT8, "torch_gpt2", "int8"),
    ("Hugging Face, bfloat16 (precision=bf16)", "hf", "bfloat16"),
    ("ONNX, float32", "onnx", "float32"),
    ("ONNX, float16", "onnx", "float16"),
    ("ONNX, int8", "onnx", "int8"),
    ("ONNX, int4", "onnx", "int4"),
    (QDQ, "onnx", "int8"),
    ("GGUF, F32", "gguf", "float32"),
    ("GGUF, F16", "gguf", "float16"),
    ("GGUF, Q8_0", "gguf", "int8"),
    ("GGUF, Q4_0", "gguf", "int4"),
)
"""Name in the table, format, and type of the weights; the first row is the measure."""


@dataclass(kw_only=True)
class Request:
    config: Path = flag("YAML of the model", required=True)
    words: tuple[str, ...] = flag(
        "keys of the configuration to set", positional=True, nargs="*", metavar="section.key=value"
    )


def main() -> None:
    arguments = parse(Request, None, __doc__)
    from common.conversion.convert import convert
    from common.evaluation import open_task
    from common.inputs import make_run
    from common.resolve.derive import resolve_config
    from common.run_config import load_config

    words = ["device=cpu", *arguments.words]
    config, inputs = make_run(load_config(arguments.config, words), "eval")
    task = open_task(config, corpus=inputs.corpus, tokenizer=inputs.tokenizer)
    configs = {
        precision: resolve_config(load_config(arguments.config, [*words, f"precision={precision}"]))
        for precision in ("float32", "bf16")
    }
    assert inputs.checkpoint is not None
    source = inputs.checkpoint.path
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in task.windows()]  # type: ignore[union-attr]
    tokens = sum(targets.size for _, targets in batches)
    table: list[tuple[str, ...]] = []
    first = None
    with tempfile.TemporaryDirectory() as root:
        for title, format, dtype in FORMATS:
            folder = Path(root) / title
            given = Path(root) / OWN_INT8 if title == QDQ else source
            convert(given, folder, target_format=format, dtype=dtype, weights_only=True)
            loss_sum = OPENED[format](folder, configs["bf16" if format == "hf" else "float32"])
            loss = sum(loss_sum(*batch) for batch in batches) / tokens
            first = loss if first is None else first
            size = sum(file.stat().st_size for file in folder.iterdir() if is_weights(file))
            row = (title, f"{loss:.5f}", f"{loss - first:+.5f}", f"{size / 1e6:.1f}")
            table.append(row)
            print(*row, file=sys.stderr, flush=True)
    print(f"{source}, {tokens} tokens of validation")
    print_table(("format", "loss", "beside float32", "MB"), table)


def is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".onnx", ".data", ".gguf")


def open_torch(folder: Path, config: Any) -> Loss:
    """The backend's model, as predict and eval open it."""
    from common.training.opened_checkpoint import Checkpoint
    from torch_gpt2.device import open_device
    from torch_gpt2.int8 import load_model

    return sums_of(load_model(config, open_device(config), Checkpoint(folder)))


def sums_of(model: Any) -> Loss:
    import torch

    def loss_sum(ids: Any, targets: Any) -> float:
        with torch.inference_mode():
            given = (torch.from_numpy(np.ascontiguousarray(x)).long() for x in (ids, targets))
            return float(model.eval().loss_sum(*given))

    return loss_sum


def open_onnx(folder: Path, config: Any) -> Loss:
    from common.systems.onnx.session import logits

    def loss_sum(ids: Any, targets: Any) -> float:
        found = logits(folder, config.model, ids).astype(np.float64)
        found -= found.max(-1, keepdims=True)
        log_sums = np.log(np.exp(found).sum(-1))
        picked = np.take_along_axis(found, targets[..., None].astype(np.int64), -1)[..., 0]
        return float((log_sums - picked).sum())

    return loss_sum


def open_gguf(folder: Path, config: Any) -> Loss:
    """Blocks made float32 by gguf, in the backend's model."""
    import gguf
    import torch

    from common.systems.gguf.read import NAME_MAP
    from common.systems.weights import weights_from
    from common.tensor_files.arrays import FileTensor
    from torch_gpt2.device import open_device
    from torch_gpt2.model import build_model

    stored = {}
    for tensor in gguf.GGUFReader(folder / "model.gguf").tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = np.ascontiguousarray(values)
        stored[tensor.name] = FileTensor(
            name=tensor.name,
            dtype="float32",
            shape=values.shape,
            segments=(values.reshape(-1).view(np.uint8),),
        )
    weights = weights_from(
        folder, NAME_MAP, stored, config.model, format="gguf", path=folder, ignored={}
    )
    model = build_model(config, open_device(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            array = np.array(weights.tensors[name].load())
            parameter[: len(array)] = torch.from_numpy(array)
    return sums_of(model)


OPENED = {"torch_gpt2": open_torch, "hf": open_torch, "onnx": open_onnx, "gguf": open_gguf}

if __name__ == "__main__":
    main()
