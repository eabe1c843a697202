"""Record of one training step: tokens, weights, activations and gradients of every layer.

tools/compare_runs.py --layers asks for it through the variable VARIABLE. Each rank writes its part:

    rank_00000.safetensors    SECTION/NAME, float32; an activation is (samples, tokens x channels)
    rank_00000.json           the rectangle of each tensor that this rank has, and what is whole

Activations are those of some samples, spread over the global batch. Gradients are of the mean loss
of the whole batch, before clipping, without the loss scale.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import StorageError
from common.files import atomic_write
from common.parallel.run import Run
from common.parallel.topology import Coordinates, Topology
from common.structured_files import parse_json
from common.tensor_files.safetensors_file import write_safetensors
from common.weights.names import parameter_shapes
from common.weights.pieces import Array, Rectangle, TensorSlice

VARIABLE = "GPT2_RECORD_STEP"
TOKENS, WEIGHTS, FORWARD, BACKWARD, GRADIENTS = (
    "tokens", "weights", "forward", "backward", "gradients",
)  # fmt: skip
EMBEDDINGS = "embeddings"
"""Name of the input of the first block."""
LAST_NORM = "ln_f"
PARTS = ("ln_1", "attn", "ln_2", "mlp")
"""Parts of a block whose outputs are recorded, in the order of the forward pass."""


def record_request(*, step: int, samples: int, folder: Path) -> dict[str, str]:
    """Return the environment that lets a run record a step. samples: number of those whose activations are kept."""
    return {VARIABLE: json.dumps({"step": step, "samples": samples, "folder": str(folder.absolute())})}


def activation_names(layers: int) -> Iterator[str]:
    """Yield the names of recorded activations in the order of the forward pass."""
    yield EMBEDDINGS
    for layer in range(layers):
        yield from (f"h.{layer}.{part}" for part in PARTS)
        yield f"h.{layer}"
    yield LAST_NORM


class RecorderBase(ABC):
    """Base of the backends' recorders, which hook a model's layers in one step and write its part of the record."""

    def __init__(self, config: Run, topology: Topology, rank: int, *, step: int, samples: int, folder: str) -> None:
        """step, samples, folder: see ``record_request``."""
        self.step = step
        self._folder, self._config, self._topology = Path(folder), config, topology
        self._rank, self._at = rank, topology.coordinates(rank)
        sizes = config.batch_sizes
        global_batch = sizes.at(sizes.samples_after(step - 1))
        count = min(samples, global_batch)
        self._samples = [index * global_batch // count for index in range(count)]
        """Places in the global batch, spread evenly, so that each rank has some of them."""
        self._local_batch = global_batch // topology.data
        self._first = self._at.data * self._local_batch
        self._found: dict[str, dict[int, Array]] = {}
        """Activations by SECTION/NAME, then by the number of the sample among the recorded ones."""
        self._scale = 1.0
        """Loss scale of the gradients."""
        self._hooks: list[Any] = []
        self._micro_batch: int | None = None

    def watch(self, micro_batch: int | None) -> None:
        """Take the activations of what is computed next; None takes nothing."""
        self._micro_batch = micro_batch

    @staticmethod
    @abstractmethod
    def on_host(values: Any) -> Array:
        """Return a tensor as float32 of the host."""

    @staticmethod
    @abstractmethod
    def pieces_on_host(tensors: Mapping[str, Any], pieces: Mapping[str, TensorSlice]) -> Mapping[str, Array]:
        """Return pieces of tensors as float32 of the host."""

    @abstractmethod
    def layers(self, part: Any) -> Iterator[tuple[str, Any]]:
        """Yield the blocks of a part of the model, and its last norm, with their names."""

    def begin(self, tokens: Any, parts: Sequence[Any], scale: float) -> None:
        """Watch the parts of the model during a step. tokens: of this rank. scale: of the loss."""
        if self._at.tensor == 0 and self._at.pipeline == 0:
            rows = np.asarray(tokens)
            self._found[TOKENS] = {
                number: rows[row].astype(np.float32)[:, None] for number, row in self._rows(0, len(rows))
            }
        self._scale = scale
        for part in parts:
            for name, layer in self.layers(part):
                if name == "h.0":
                    hook = layer.register_forward_pre_hook(lambda _, given: self._see(EMBEDDINGS, given[0]))
                    self._hooks.append(hook)
                inner = {f"{name}.{each}": getattr(layer, each) for each in PARTS if name != LAST_NORM}
                for own, each in {**inner, name: layer}.items():
                    hook = each.register_forward_hook(lambda _, given, output, own=own: self._see(own, output))
                    self._hooks.append(hook)

    def _see(self, name: str, output: Any) -> None:
        """Keep an activation of the micro batch under way, and later its gradient."""
        number, output = self._micro_batch, output[0] if isinstance(output, tuple) else output
        if number is not None:
            self._take(FORWARD, name, number, output)
            output.register_hook(lambda gradient: self._take(BACKWARD, name, number, gradient))

    def _take(self, section: str, name: str, micro_batch: int, values: Any) -> None:
        """Keep an activation (samples, tokens, channels), or its gradient, of the recorded samples of a micro batch."""
        size = self._config.train.micro_batch_size
        if values.shape[1] == self._config.model.seq_length and self._at.tensor:
            return  # the first rank of the group has the same
        factor = np.float32(1.0 if section == FORWARD else 1.0 / self._scale)
        found = self._found.setdefault(f"{section}/{name}", {})
        for number, row in self._rows(micro_batch * size, min(size, values.shape[0])):
            if number not in found:
                found[number] = self.on_host(values[row]) * factor

    def end(
        self, loss: Any, weights: Mapping[str, Any], gradients: Mapping[str, Any], pieces: Mapping[str, TensorSlice]
    ) -> None:
        """Remove the hooks and write the record, before the update. pieces: those that this rank
        writes. Raises StorageError.
        """
        for hook in self._hooks:
            hook.remove()
        tensors: dict[str, Array] = {}
        rectangles: dict[str, Rectangle] = {}
        for section, given, factor in (
            (GRADIENTS, gradients, np.float32(self._scale)),
            (WEIGHTS, weights, np.float32(1.0)),
        ):
            for name, array in self.pieces_on_host(given, pieces).items():
                tensors[f"{section}/{name}"] = array / factor
                rectangles[f"{section}/{name}"] = pieces[name]
        for name, found in self._found.items():
            if not found:
                continue
            numbers = sorted(found)
            tokens, width = found[numbers[0]].shape
            length = self._config.model.seq_length
            first = 0 if name == TOKENS or tokens == length else self._at.tensor * tokens
            tensors[name] = np.stack([found[number].reshape(-1) for number in numbers])
            rectangles[name] = [
                [numbers[0], numbers[-1] + 1], [first * width, (first + tokens) * width],
            ]  # fmt: skip
        stem, model = self._folder / f"rank_{self._rank:05d}", self._config.model
        facts = {
            "step": self.step,
            "ranks": self._topology.world_size,
            "loss": float(loss),
            "samples": self._samples,
            "ranks_of_samples": [  # the first of the ranks that read each
                self._topology.rank(Coordinates(data=sample // self._local_batch, tensor=0, pipeline=0))
                for sample in self._samples
            ],
            "sequence": model.seq_length,
            "hidden": model.hidden_size,
            "layers": model.num_layers,
            "compute": self._config.precision.compute,
            "backend": self._config.backend,
            "shapes": parameter_shapes(model),
            "pieces": rectangles,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(stem.with_suffix(".safetensors"), tensors)
            with atomic_write(stem.with_suffix(".json"), "w") as file:
                json.dump(facts, file)
        except OSError as error:
            raise StorageError(
                f"{stem}.safetensors: the record of step {self.step} could not be written: {error.strerror or error}"
            ) from None

    def _rows(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield recorded samples among ``count`` of this rank from ``start`` on: the number of the
        sample among the recorded ones, and its row among these.
        """
        first = self._first + start
        for number, sample in enumerate(self._samples):
            if first <= sample < first + count:
                yield number, sample - first


def open_recorder(recorder: type[RecorderBase], config: Run, topology: Topology, rank: int) -> RecorderBase | None:
    """Return the recorder that the environment asks for."""
    text = os.environ.get(VARIABLE)
    return recorder(config, topology, rank, **parse_json(text)) if text else None
