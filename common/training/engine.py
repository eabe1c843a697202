"""Interface of an engine, a model with its optimizer on some devices; its learning rate and limits;
common part of the backends' models whose layers round.

Limits make a step an outlier whose loss or gradient norm stands out from earlier steps. They follow
from a history and are known before a step. This is SkipStepOptimizer of OLMo-core with one
difference: only values above the mean count, since a small loss does no harm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import Snapshot
from common.config.schema import LoggingConfig, OptimizerConfig
from common.dataset.sampler import Batch, Tokens
from common.log import LOG
from common.parallel.run import Run
from common.parallel.sharding import Role, role_of
from common.parallel.topology import GroupKind
from common.parallel.updates import learning_rate
from common.parallel.world import WorldBase
from common.quantization import ActivationScales, quantized_layers
from common.training.opened_checkpoint import Checkpoint
from common.training.recording import RecorderBase
from common.training.start import Start


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Maximum loss and gradient norm of a step that is not an outlier.

    They are float32 values, so that a device decides like the host.
    """

    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = Limits()


def limits_of(state: TrainState, config: LoggingConfig) -> Limits:
    """Return the mean plus ``outlier_deviations`` sample deviations of the history.

    There are no limits while the check is off or the history is below half a window.
    """
    if not config.outlier_deviations or len(state.losses) < config.outlier_window // 2:
        return NO_LIMITS
    return Limits(
        loss=_limit(state.losses, config.outlier_deviations),
        grad_norm=_limit(state.grad_norms, config.outlier_deviations),
    )


def record_outlier(state: TrainState, config: LoggingConfig, loss: float, grad_norm: float, *, skipped: bool) -> bool:
    """Warn if the last step is an outlier, and add it to the history if it was finite.

    Outliers are added too, as in OLMo-core. The limits then follow a lasting change of level within
    a few steps. A history without outliers would skip forever. The price is that one spike widens
    the limits as long as it stays in the window.
    """
    # drop the history, which would be outdated when the check is turned on again
    if not config.outlier_deviations:
        state.losses, state.grad_norms = [], []
        return False
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # which is left to the loss scale
        return False
    limits = limits_of(state, config)
    values = (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm))
    found = " and ".join(f"{name} {value:.4g} is above {limit:.4g}" for name, value, limit in values if value > limit)
    if found:
        LOG.warning(
            f"step {state.step}: {found}, the mean and {config.outlier_deviations:g} x the"
            f" deviation of {len(state.losses)} steps before" + ("; the update is skipped" if skipped else "")
        )
    state.losses = [*state.losses, loss][-config.outlier_window :]
    state.grad_norms = [*state.grad_norms, grad_norm][-config.outlier_window :]
    return bool(found)


def _limit(values: list[float], deviations: float) -> float:
    # fsum rounds once, so the limit does not depend on the machine or the order of the sum
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    if deviation == 0.0:  # constant values give no scale for a deviation
        return math.inf
    return float(np.float32(min(mean + deviations * deviation, float(np.finfo(np.float32).max))))


class Schedule:
    """Schedule that moves with the updates that are made, and not with steps that are skipped."""

    def __init__(self, optimizer: OptimizerConfig, state: TrainState) -> None:
        self._optimizer, self._by_samples = optimizer, optimizer.schedule_unit == "samples"
        self._position = optimizer.schedule_start + (
            state.updated_samples if self._by_samples else state.step - state.skipped_steps
        )

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return self.rates(1)[0]

    def rates(self, count: int, samples: int = 0) -> list[float]:
        """Return the rates of the next ``count`` updates, each with so many samples."""
        step = samples if self._by_samples else 1
        return [learning_rate(self._optimizer, self._position + number * step) for number in range(count)]

    def advance(self, samples: int) -> None:
        """Move on after an update with so many samples."""
        self._position += samples if self._by_samples else 1


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one optimizer step, over all ranks."""

    loss: float
    """Mean loss of the global batch, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale."""
    learning_rate: float
    """Rate of this update, or of the one that was skipped."""
    loss_scale: float
    skipped: bool
    """Whether the weights did not change, because the gradient was not finite or beyond the limits."""
    seconds: float | None = None
    """Time that the device took. Where it is None, the host sees when a step ends."""


class Engine(ABC):
    """Engine of a run, created on every rank, then started by ``begin``, then asked for steps."""

    steps_per_run: int
    """Preferred number of steps in a call of ``run``: 1, or the sink size of a graph that loops."""
    recorder: RecorderBase | None = None
    """Recorder of one step, if the environment asks for one."""

    @abstractmethod
    def begin(self, start: Start) -> TrainState:
        """Fill weights, optimizer and random generators; return the state to train from.

        They come from the checkpoint to resume. Without one, the weights are those of
        ``start.weights`` or the initial ones, and no samples are read yet. Raises CheckpointError.
        """

    def identity(self) -> dict[str, Any]:
        """Return facts that must be equal on every rank, beyond the config, the data and the state."""
        return {}

    def kernels(self) -> dict[str, str]:
        """Return the kernels that parts of a step run, for config.yaml. Call it after ``begin``."""
        return {}

    @abstractmethod
    def norm_of_weights(self) -> float:
        """Return the norm of this rank's weights, equal on ranks with the same weights."""

    @abstractmethod
    def norm_of_moments(self) -> float:
        """Return the norm of this rank's optimizer state; 0 before the first step."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the bytes of weights and optimizer state that this rank holds, as the framework
        has them. Before the first step an optimizer may have no state.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch as ``run`` takes it best. Called in the thread that reads ahead."""
        return batch

    @abstractmethod
    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """Take ``steps`` batches and start as many optimizer steps.

        Returns the results that are known, in the order of the steps. An engine may keep those of
        the last steps, which its device still computes, for the next call or for ``finish``. A step
        beyond the limits does not change weights and optimizer.
        """

    def finish(self) -> list[StepResult]:
        """Wait for the steps under way and return their results. Call it before ``evaluate`` and
        ``snapshot`` where ``run`` returned fewer results than steps.
        """
        return []

    @abstractmethod
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Return the summed loss of all predicted tokens of all ranks, in nats, and their number."""

    @abstractmethod
    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Return everything needed to resume from ``state``; None on ranks that need not write.

        The snapshot before must have been written.
        """


class QuantizedModel:
    """Quantizers of a rank's parts of a model, as the section ``quantization`` says, and the scales that all ranks
    share.
    """

    def __init__(
        self, config: Run, world: WorldBase, linears: Iterable[tuple[str, Any]], make: Callable[..., Any]
    ) -> None:
        """Give each linear layer its quantizer. linears: the layers of this rank by name.

        make: returns a quantizer, given settings, layer, and the groups whose parts of weight and input share a scale.
        """
        settings = config.quantization
        assert settings is not None
        self._world, self._micro_batch_size = world, config.train.micro_batch_size
        self.scales = ActivationScales(quantized_layers(settings, config.model.num_layers), settings)
        self._averages = settings.activations == "moving_average_abs_max"
        self.quantizers: dict[str, Any] = {}
        """Quantizers by layer, for the layers of this rank."""
        group = world.groups.get(GroupKind.TENSOR)
        for name, layer in linears:
            if name in self.scales.layers:
                of_input = group if role_of(f"{name}.weight") is Role.ROW else None
                of_weight = group if settings.weights == "abs_max" else of_input
                layer.quantizer = self.quantizers[name] = make(settings, layer, of_weight, of_input)

    def begin_step(self, tokens: Tokens, evaluate: Callable[[list[Tokens]], object]) -> None:
        """Measure missing scales on the batch of a step, and forget the maxima."""
        micro = self._micro_batch_size
        self.calibrate(lambda: evaluate([tokens[at : at + micro] for at in range(0, len(tokens), micro)]))
        self._forget()

    def _forget(self) -> None:
        for quantizer in self.quantizers.values():
            quantizer.forget()

    def _set_scales(self) -> None:
        for name, quantizer in self.quantizers.items():
            quantizer.set_scale(float(self.scales.scale(name)))

    def end_step(self) -> None:
        """Record the maxima of all ranks, unless one is not finite. Every rank calls it."""
        if not self._averages:
            return
        mine = {name: float(quantizer.maximum) for name, quantizer in self.quantizers.items()}
        ranks = self._world.gather([mine.get(layer, 0.0) for layer in self.scales.layers])  # 0: of another rank
        if all(math.isfinite(maximum) for maxima in ranks for maximum in maxima):
            self.scales.update([max(column) for column in zip(*ranks, strict=True)])
            self._set_scales()

    def load(self, reader: Checkpoint) -> None:
        """Load the scales of a checkpoint, if it has any."""
        reader.load_scales(self.scales)
        self._set_scales()

    def calibrate(self, run: Callable[[], object]) -> None:
        """Measure missing scales on the computation of ``run``.

        Meanwhile weights are rounded, but activations are not.
        """
        if self._averages and not self.scales.is_known:
            self._forget()
            run()
            self.end_step()
