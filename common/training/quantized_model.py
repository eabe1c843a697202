"""Common part of the backends' quantized models: when scales are measured, loaded and set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from common.parallel.run import Run
from common.parallel.world import WorldBase
from common.quantization import ActivationScales, quantized_layers
from common.training.opened_checkpoint import Checkpoint


class QuantizedModel(ABC):
    """Scales of a model whose layers round, equal on every rank."""

    def __init__(self, config: Run, world: WorldBase) -> None:
        settings = config.quantization
        assert settings is not None
        self.settings = settings
        self._world = world
        layers = quantized_layers(settings, config.model.num_layers)
        self.scales = ActivationScales(layers, settings)
        self._averages = settings.activations == "moving_average_abs_max"

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the maxima of the previous step."""

    @abstractmethod
    def _maximum(self, layer: str) -> float:
        """Return the largest absolute input of a layer in this step; 0 for a layer of another
        rank.
        """

    @abstractmethod
    def _set_scales(self) -> None:
        """Pass the scales to the layers of this rank."""

    def end_step(self) -> None:
        """Record the maxima of all ranks, unless one is not finite. Every rank calls it."""
        if not self._averages:
            return
        ranks = self._world.gather([self._maximum(layer) for layer in self.scales.layers])
        if all(math.isfinite(maximum) for maxima in ranks for maximum in maxima):
            self.scales.update([max(column) for column in zip(*ranks, strict=True)])
            self._set_scales()

    def load(self, reader: Checkpoint) -> None:
        """Load the scales of a checkpoint, if it has any. Raises CheckpointError."""
        reader.load_scales(self.scales)
        self._set_scales()

    def calibrate(self, run: Callable[[], object]) -> None:
        """Measure missing scales on the computation of ``run``.

        Meanwhile weights are rounded, but activations are not.
        """
        if self._averages and not self.scales.is_known:
            self.begin_step()
            run()
            self.end_step()
