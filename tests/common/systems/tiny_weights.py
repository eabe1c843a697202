"""Weights of tiny models in memory, and conversions that must be refused."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config.resolved import ResolvedModel
from common.systems.table import FORMATS
from common.systems.weights import Weight, Weights
from common.weights.names import parameter_shapes
from tools.convert_weight import main


def random_arrays(model: ResolvedModel, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a normal array for each parameter."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in parameter_shapes(model).items()}


def as_weights(model: ResolvedModel, arrays: Mapping[str, Any], dtype: str = "float32", **more: Any) -> Weights:
    """Return weights of these arrays. more: fields of Weights, with moments as arrays."""

    def named(tensors: Mapping[str, Any], dtype: str) -> dict[str, Weight]:
        return {
            name: Weight(dtype=dtype, shape=array.shape, load=lambda array=array: array)
            for name, array in tensors.items()
        }

    moments = named(more.pop("moments", {}), "float32")
    fields = {"path": Path("made.here"), "format": "random", "moments": moments} | more
    return Weights(model=model, tensors=named(arrays, dtype), **fields)


def require_arrays(path: Path, format: str, arrays: Mapping[str, Any]) -> Weights:
    """Require that weights are these arrays bit for bit. Returns them."""
    found = FORMATS[format].open(path)
    assert found.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.tensors[name].load(), array, err_msg=name)
    return found


class Evil:
    """What runs a command where its pickle is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def resave(file: Path, edit: Callable[[Any], object]) -> None:
    """Change the tree in a file of torch's."""
    torch = pytest.importorskip("torch")
    tree = torch.load(file, weights_only=False)
    edit(tree)
    torch.save(tree, file)


def refused(capsys: pytest.CaptureFixture[str], source: Path, message: str, *words: str, to: str = "hf") -> None:
    """Convert ``source``: one message says why not, and nothing is left."""
    capsys.readouterr()  # what made the source may have said something
    out = source.parent / "refused"
    code = main(["--to", to, "--input", str(source), "--output", str(out), *words])
    error = capsys.readouterr().err
    assert code == 2 and error.count("error: ") == 1 and "Traceback" not in error
    assert re.search(message, error.replace("\n", " ")), error
    assert not list(source.parent.glob("*refused*"))
