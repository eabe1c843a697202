"""Base of MindSpore's engines: the start of a run, queued steps, and snapshots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from common.checkpoint.snapshot import EngineState, TrainState, make_snapshot, owned_pieces
from common.checkpoint.writer import Part, Snapshot
from common.dataset.sampler import Batch, Tokens
from common.parallel.run import Run
from common.parallel.sharding import initial_values
from common.systems.mindformers.write import epoch_and_step, write_rank_file
from common.training import engine
from common.training.engine import NO_LIMITS, Limits, StepResult
from common.training.start import Start
from common.weights.pieces import TensorSlice
from mindformers_gpt2.checkpoint import fill_moments, fill_weights, moments_on_host, weights_on_host
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import takes_fused_attention
from mindformers_gpt2.optimizer import DeviceLossScale, MasterWeights, Optimizer, global_norm
from mindformers_gpt2.parallel.world import World
from mindformers_gpt2.quantize import Quantization

QueuedStep = tuple[Tensor, Tensor, Tensor, Tensor]
"""Loss, gradient norm, whether the step was applied, and loss scale.

The tensors may still be in computation on the device.
"""


class BaseEngine(engine.Engine):
    """An engine of one rank."""

    master: MasterWeights
    optimizer: Optimizer
    loss_scale: DeviceLossScale
    pieces: dict[str, TensorSlice]
    """Part of each parameter that this rank holds."""
    quantization: Quantization | None = None
    is_sharded: bool
    """Whether ranks hold different parts of the weights, so that each writes its own."""
    owns: Callable[[str], bool]
    """Whether this rank writes a parameter. Among ranks that hold the same part, one does."""

    def __init__(
        self,
        config: Run,
        device: MindSporeDevice,
        world: World | None = None,
        manifest_extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Create an engine. manifest_extra: plain data kept in every checkpoint's manifest."""
        self.config = config
        self.device = device
        self.world = world or World()
        self.manifest_extra = dict(manifest_extra or {})
        self.step = 0
        self.schedule = engine.Schedule(config.optimizer, TrainState())
        self.steps_per_run = config.train.sink_size
        self._build()

    @abstractmethod
    def _build(self) -> None:
        """Make the model, and what updates it."""

    @abstractmethod
    def _train_step(self, tokens: Tokens, limits: Tensor) -> QueuedStep:
        """Start a step. limits: the largest loss and gradient norm, float32 (2,)."""

    def begin(self, start: Start) -> TrainState:
        reader = start.checkpoint
        config, loss_scale = self.config, self.loss_scale.read()
        states = reader.states(self.config, loss_scale) if reader and start.resume else None
        self.device.seed(self.config.seed)
        pieces = self.pieces
        values = reader.weights(config.model, pieces) if reader else initial_values(config, pieces)
        fill_weights(self.master.tensors, values)
        if reader is not None and self.quantization is not None:
            self.quantization.load(reader)
        state = TrainState()
        if reader is not None and states is not None:
            state, saved = states
            self.loss_scale.write(loss_scale)
            steps = saved.optimizer_steps
            moments = reader.moments(self.config, steps, self.pieces)
            if fill_moments(self.optimizer, moments):
                steps = max(steps, 1)  # torch's sgd counts no steps, but has a momentum
            ops.assign(self.optimizer.steps, Tensor(steps, ms.int32))
        self.world.meet()  # the next line communicates with ZeRO
        self.master.write_back()
        self.step = state.step
        self.schedule = engine.Schedule(self.config.optimizer, state)
        return state

    def kernels(self) -> dict[str, str]:
        fused = takes_fused_attention(self.config, self.device)
        return {
            "attention": "FlashAttentionScore" if fused else "written out",
            "layer norm": f"LayerNorm in {self.config.precision.layer_norm}",
            "optimizer": " and ".join(self.optimizer.kernels),
        }

    def norm_of_weights(self) -> float:
        return float(global_norm(*self.master.tensors.values()).asnumpy())

    def norm_of_moments(self) -> float:
        found = [tensor for part in self.optimizer.state.values() for tensor in part.values()]
        return float(global_norm(*found).asnumpy()) if found else 0.0

    def state_bytes(self) -> int:
        moments = [tensor for part in self.optimizer.state.values() for tensor in part.values()]
        tensors = [*self.master.model.values(), *self.master.tensors.values(), *moments]
        return sum({id(tensor): int(tensor.nbytes) for tensor in tensors}.values())

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """Start ``steps_per_run`` steps before the result of the first is read.

        The device has the rates of so many updates, and takes the next one after each that it
        makes. By samples they suppose batches of one size, so results are read where it changes.
        """
        self.world.meet()
        most = Tensor((limits.loss, limits.grad_norm), ms.float32)
        results: list[StepResult] = []
        queued: list[QueuedStep] = []
        samples = 0
        for _ in range(steps):
            batch = next(batches)
            if len(queued) == self.steps_per_run or batch.samples != samples:
                results += [self._wait(samples, *step) for step in queued]
                queued, samples = [], batch.samples
                self.optimizer.set_rates(self.schedule.rates(self.steps_per_run, samples))
            queued.append(self._train_step(batch.tokens, most))
        return results + [self._wait(samples, *step) for step in queued]

    def _wait(self, samples: int, loss: Tensor, norm: Tensor, applied: Tensor, scale: Tensor) -> StepResult:
        """Wait for a queued step, and move the schedule as the device has done."""
        result = StepResult(
            loss=float(loss.asnumpy()),
            grad_norm=float(norm.asnumpy()),
            learning_rate=self.schedule.rate(),
            loss_scale=float(scale.asnumpy()),
            skipped=not bool(applied.asnumpy()),
        )
        if not result.skipped:
            self.schedule.advance(samples)
        return result

    def owned_pieces(self) -> dict[str, TensorSlice]:
        """Return the pieces of parameters that this rank writes, without padded vocabulary."""
        pieces = owned_pieces(self.pieces, self.owns, self.config.model)
        return {name: piece for name, piece in pieces.items() if piece[0][0] < piece[0][1]}

    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Copy weights, optimizer state and counters to the host: all of them, or this rank's part."""
        if self.world.rank and not self.is_sharded:
            return None
        config, rank = self.config, self.world.rank
        pieces = self.owned_pieces()
        weights = weights_on_host(self.master.tensors, pieces)
        steps = int(self.optimizer.steps.asnumpy())
        moments = moments_on_host(self.optimizer, pieces) if steps else {}
        snapshot = make_snapshot(
            config,
            state,
            weights=weights,
            moments=moments,
            engine=EngineState(
                optimizer_steps=steps,
                loss_scale=self.loss_scale.read().state(),
                rng={"mindspore": {}},  # dropout masks follow from the seed, the step and the place
                quantization=self.quantization.scales.state() if self.quantization else {},
            ),
            versions={"backend": "mindspore", "mindspore": ms.__version__},
            extra=self.manifest_extra,
            part=Part(rank=rank, ranks=self.world.size, rectangles=pieces) if self.is_sharded else None,
        )
        if config.checkpoint.ckpt_prefix is None:
            return snapshot
        place = epoch_and_step(config, int(self.manifest_extra.get("samples_per_epoch", 0)), state)
        return replace(snapshot, also_write=partial(write_rank_file, config, place, rank, self.is_sharded))
