"""Integers of a folder of ours: its 8-bit weights, or those that a run trained to become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.checkpoint.manifest import MANIFEST
from common.checkpoint.snapshot import MODEL_FILE
from common.config.schema import QuantizationConfig
from common.errors import CheckpointError, GPT2Error
from common.quantization.integers import trained_scheme
from common.quantization.scheme import ActivationScales, quantized_layers
from common.weights.quantized import QuantizedReader, Scheme, open_parameters


def holds_integers(folder: Path) -> bool:
    """Tell whether the weights of a folder of ours have 8 bits.

    The file decides; the manifest is not read. A damaged file is reported by the reader.
    """
    file = folder / MODEL_FILE
    with suppress(GPT2Error, OSError):
        if file.is_file():
            with open_parameters(file) as reader:
                return isinstance(reader, QuantizedReader)
    return False


@contextmanager
def open_integers(folder: Path, manifest: Mapping[str, Any]) -> Iterator[QuantizedReader | None]:
    """Open the file of a folder with 8-bit weights; None if they are float."""
    if MODEL_FILE not in manifest["files"]:
        yield None
        return
    with open_parameters(folder / MODEL_FILE) as reader:
        yield reader if isinstance(reader, QuantizedReader) else None


def load_scales(folder: Path, manifest: Mapping[str, Any], scales: ActivationScales) -> None:
    """Load the scales of activations of a checkpoint, if any. Raises CheckpointError for broken
    ones.
    """
    try:
        scales.load(manifest.get("engine", {}).get("quantization", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: broken scales of activations ({error}); use another checkpoint"
        ) from None


def scheme_of(folder: Path, manifest: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a checkpoint are, or were trained to become, integers; None if
    unknown. Raises CheckpointError and ConfigError.
    """
    with open_integers(folder, manifest) as reader:
        if reader is not None:
            return reader.scheme
    config = manifest.get("config", {})
    if not config.get("quantization"):
        return None
    try:
        settings = QuantizationConfig.model_validate(config["quantization"])
        blocks = config["model"]["num_layers"]
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: broken manifest ({error!r}); use another checkpoint") from None
    scales = ActivationScales(quantized_layers(settings, blocks), settings)
    load_scales(folder, manifest, scales)
    return trained_scheme(folder, settings, blocks, scales)
