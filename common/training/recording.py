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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import StorageError
from common.files import atomic_write
from common.parallel.run import Run
from common.parallel.topology import Coordinates, Topology
from common.structured_files import parse_json
from common.tensor_files.safetensors_file import write_safetensors
from common.weights.names import parameter_shapes
from common.weights.pieces import Rectangle, TensorSlice, to_rectangle

VARIABLE = "GPT2_RECORD_STEP"
TOKENS, WEIGHTS, FORWARD, BACKWARD, GRADIENTS = (
    "tokens", "weights", "forward", "backward", "gradients",
)  # fmt: skip
EMBEDDINGS = "embeddings"
"""Name of the input of the first block."""
LAST_NORM = "ln_f"
PARTS = ("ln_1", "attn", "ln_2", "mlp")
"""Parts of a block whose outputs are recorded, in the order of the forward pass."""

Array = NDArray[np.float32]
R = TypeVar("R", bound="RecorderBase")


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """Step to record, number of samples whose activations are kept, and folder of the record."""

    step: int
    samples: int
    folder: Path

    def variables(self) -> dict[str, str]:
        """Return the environment that lets a run record."""
        text = json.dumps(
            {"step": self.step, "samples": self.samples, "folder": str(self.folder.absolute())}
        )
        return {VARIABLE: text}


def activation_names(layers: int) -> Iterator[str]:
    """Yield the names of recorded activations in the order of the forward pass."""
    yield EMBEDDINGS
    for layer in range(layers):
        yield from (f"h.{layer}.{part}" for part in PARTS)
        yield f"h.{layer}"
    yield LAST_NORM


def recorded_samples(wanted: int, global_batch: int) -> list[int]:
    """Return places in the global batch, spread evenly, so that each rank has some of them."""
    count = min(wanted, global_batch)
    return [index * global_batch // count for index in range(count)]


class StepRecord:
    """One rank's part of the record of a step."""

    def __init__(self, request: RecordRequest, config: Run, topology: Topology, rank: int) -> None:
        self.step = request.step
        self._folder, self._config, self._topology = request.folder, config, topology
        self._rank, self._at = rank, topology.coordinates(rank)
        sizes = config.batch_sizes
        global_batch = sizes.at(sizes.samples_after(request.step - 1))
        self._samples = recorded_samples(request.samples, global_batch)
        self._local_batch = global_batch // topology.data
        self._first = self._at.data * self._local_batch
        self._found: dict[str, dict[int, Array]] = {}
        """Activations by SECTION/NAME, then by the number of the sample among the recorded ones."""
        self._tensors: dict[str, Array] = {}
        self._pieces: dict[str, Rectangle] = {}

    def take_tokens(self, tokens: Any) -> None:
        """Keep the recorded samples of this rank's batch."""
        if self._at.tensor == 0 and self._at.pipeline == 0:
            rows = np.asarray(tokens)
            for number, row in self._rows(0, len(rows)):
                self._found.setdefault(TOKENS, {})[number] = rows[row].astype(np.float32)[:, None]

    def take_activation(
        self,
        section: str,
        name: str,
        micro_batch: int,
        shape: Sequence[int],
        read: Callable[[int], Array],
    ) -> None:
        """Keep an activation, or its gradient, of the recorded samples of a micro batch.

        shape: (samples, tokens, channels). read: returns a sample, (tokens, channels).
        """
        size = self._config.train.micro_batch_size
        if shape[1] == self._config.model.seq_length and self._at.tensor:
            return  # the first rank of the group has the same
        found = self._found.setdefault(f"{section}/{name}", {})
        for number, row in self._rows(micro_batch * size, min(size, shape[0])):
            if number not in found:
                found[number] = read(row)

    def take_parameters(
        self, section: str, values: Mapping[str, Array], pieces: Mapping[str, TensorSlice]
    ) -> None:
        """Keep this rank's pieces of parameters or of their gradients."""
        for name, array in values.items():
            self._tensors[f"{section}/{name}"] = array
            self._pieces[f"{section}/{name}"] = to_rectangle(pieces[name])

    def write(self, loss: float) -> None:
        """Write this rank's files. Raises StorageError."""
        for name, found in self._found.items():
            if not found:
                continue
            numbers = sorted(found)
            tokens, width = found[numbers[0]].shape
            length = self._config.model.seq_length
            first = 0 if name == TOKENS or tokens == length else self._at.tensor * tokens
            self._tensors[name] = np.stack([found[number].reshape(-1) for number in numbers])
            self._pieces[name] = [
                [numbers[0], numbers[-1] + 1], [first * width, (first + tokens) * width],
            ]  # fmt: skip
        stem, model = self._folder / f"rank_{self._rank:05d}", self._config.model
        facts = {
            "step": self.step,
            "ranks": self._topology.world_size,
            "loss": loss,
            "samples": self._samples,
            "ranks_of_samples": [self._rank_of(sample) for sample in self._samples],
            "sequence": model.seq_length,
            "hidden": model.hidden_size,
            "layers": model.num_layers,
            "compute": self._config.precision.compute,
            "backend": self._config.backend,
            "shapes": parameter_shapes(model),
            "pieces": self._pieces,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(stem.with_suffix(".safetensors"), self._tensors)
            with atomic_write(stem.with_suffix(".json"), "w") as file:
                json.dump(facts, file)
        except OSError as error:
            raise StorageError(
                f"{stem}.safetensors: the record of step {self.step} could not be written:"
                f" {error.strerror or error}"
            ) from None

    def _rank_of(self, sample: int) -> int:
        """Return the first of the ranks that read a sample of the global batch."""
        place = Coordinates(data=sample // self._local_batch, tensor=0, pipeline=0)
        return self._topology.rank(place)

    def _rows(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield recorded samples among ``count`` of this rank from ``start`` on: the number of the
        sample among the recorded ones, and its row among these.
        """
        first = self._first + start
        for number, sample in enumerate(self._samples):
            if first <= sample < first + count:
                yield number, sample - first


class RecorderBase(ABC):
    """Base of the backends' recorders, which hook the layers of a model during one step."""

    def __init__(self, record: StepRecord) -> None:
        self.step = record.step
        self._record = record
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
    def pieces_on_host(
        tensors: Mapping[str, Any], pieces: Mapping[str, TensorSlice]
    ) -> Mapping[str, Array]:
        """Return pieces of tensors as float32 of the host."""

    @abstractmethod
    def layers(self, part: Any) -> Iterator[tuple[str, Any]]:
        """Yield the blocks of a part of the model, and its last norm, with their names."""

    def begin(self, tokens: Any, parts: Sequence[Any], scale: float) -> None:
        """Watch the parts of the model during a step. tokens: of this rank. scale: of the loss."""
        self._record.take_tokens(tokens)
        self._scale = scale
        for part in parts:
            for name, layer in self.layers(part):
                if name == "h.0":
                    hook = self._hook_for(EMBEDDINGS)
                    self._hooks.append(
                        layer.register_forward_pre_hook(lambda _, given, hook=hook: hook(given[0]))
                    )
                for inner in PARTS if name != LAST_NORM else ():
                    self._watch(getattr(layer, inner), f"{name}.{inner}")
                self._watch(layer, name)

    def _watch(self, layer: Any, name: str) -> None:
        take = self._hook_for(name)

        def hook(_: Any, given: Any, output: Any) -> None:
            take(output[0] if isinstance(output, tuple) else output)

        self._hooks.append(layer.register_forward_hook(hook))

    def _hook_for(self, name: str) -> Callable[[Any], None]:
        """Return a function that takes an activation of the micro batch under way, and then its
        gradient.
        """

        def take(values: Any, section: str, number: int) -> None:
            factor = np.float32(1.0 if section == FORWARD else 1.0 / self._scale)
            self._record.take_activation(
                section, name, number, values.shape, lambda row: self.on_host(values[row]) * factor
            )

        def hook(output: Any) -> None:
            number = self._micro_batch
            if number is not None:
                take(output, FORWARD, number)
                output.register_hook(lambda gradient: take(gradient, BACKWARD, number))

        return hook

    def end(
        self,
        loss: Any,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        pieces: Mapping[str, TensorSlice],
    ) -> None:
        """Remove the hooks and write the record, before the update. pieces: those that this rank
        writes.
        """
        for hook in self._hooks:
            hook.remove()
        slopes = self.pieces_on_host(gradients, pieces)
        scaled = {name: values / np.float32(self._scale) for name, values in slopes.items()}
        self._record.take_parameters(GRADIENTS, scaled, pieces)
        self._record.take_parameters(WEIGHTS, self.pieces_on_host(weights, pieces), pieces)
        self._record.write(float(loss))


def open_recorder(
    recorder: Callable[[StepRecord], R], config: Run, topology: Topology, rank: int
) -> R | None:
    """Return the recorder that the environment asks for."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    found = parse_json(text)
    request = RecordRequest(**found | {"folder": Path(found["folder"])})
    return recorder(StepRecord(request, config, topology, rank))
