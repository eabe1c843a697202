"""Sensitivity of layers to quantization: the validation loss with one layer rounded at a time.

The result is a table, a JSON file and a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.evaluation.report import EvaluationResult
from common.evaluation.task import ValidationTask
from common.files import atomic_write
from common.log import progress_bar
from common.parallel.run import Run
from common.quantization.scheme import LINEARS
from common.training.plot import open_pyplot

PICTURE = "sensitivity.png"
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Validation losses in nats per token."""

    unquantized: float
    quantized: float
    """Loss with all layers of the section ``quantization`` rounded."""
    alone: Mapping[str, float]
    """Losses by layer, with this layer rounded and all others in float."""
    without_worst: float
    """Loss without rounding ``layers_to_skip``. It is measured, since damages do not add up."""

    @property
    def damage(self) -> dict[str, float]:
        """Rise of the loss by layer when only this layer is rounded, the largest first."""
        found = {name: loss - self.unquantized for name, loss in self.alone.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @classmethod
    def measure(
        cls, layers: Sequence[str], loss_with: Callable[[Collection[str]], float]
    ) -> Sensitivity:
        """Measure all losses. loss_with: returns the loss with only these layers rounded."""
        with progress_bar(total=len(layers) + 3, unit="loss", description="sensitivity") as bar:

            def loss(*some: str) -> float:
                found = loss_with(some)
                bar.update(1)
                return found

            alone = {name: loss(name) for name in layers}
            found = cls(unquantized=loss(), quantized=loss(*layers), alone=alone, without_worst=0.0)
            skip = found.layers_to_skip()
            return replace(found, without_worst=loss(*(n for n in layers if n not in skip)))

    def layers_to_skip(self) -> list[str]:
        """Return the worst layers that together do half of all damage."""
        total = sum(max(value, 0.0) for value in self.damage.values())
        found, done = [], 0.0
        for name, value in self.damage.items():
            if value <= 0 or done >= total / 2:
                break
            found.append(name)
            done += value
        return found


def sensitivity_result(task: ValidationTask, found: Sensitivity) -> EvaluationResult:
    """Draw the picture, and return table and record."""
    folder = Path(task.config.output_dir)
    assert task.config.quantization is not None
    picture = draw(found, folder / PICTURE)
    skip = [*task.config.quantization.skip, *found.layers_to_skip()]
    damage = list(found.damage.items())
    width = max(map(len, found.alone))
    lines = [
        f"validation loss {found.unquantized:.6f} in float, {found.quantized:.6f}"
        f" ({found.quantized - found.unquantized:+.6f}) with {len(damage)} layers quantized",
        f"one layer at a time, the worst {min(_SHOWN, len(damage))}:",
        *(f"  {name:<{width}}  {value:+.6f}" for name, value in damage[:_SHOWN]),
        f"these layers do half of all damage: quantization.skip=[{','.join(skip)}], with which the"
        f" loss is {found.without_worst:.6f} ({found.without_worst - found.unquantized:+.6f})",
        f"picture: {picture}",
    ]
    record: dict[str, Any] = {
        "quantization": task.config.quantization.model_dump(),
        "validation_loss": found.unquantized,
        "validation_loss_quantized": found.quantized,
        "damage": dict(damage),
        "skip": skip,
        "validation_loss_with_skip": found.without_worst,
    }
    return EvaluationResult(file_name="sensitivity.json", record=record, lines=lines)


def require_quantization(config: Run) -> None:
    """Raise ConfigError if task sensitivity has nothing to compare, or cannot be computed."""
    if config.evaluation.task != "sensitivity":
        return
    if config.backend != "torch":
        raise ConfigError(
            f"evaluation.task=sensitivity is for backend torch, not {config.backend}; add"
            " backend=torch, which opens this checkpoint too"
        )
    if config.quantization is None:
        raise ConfigError(
            "evaluation.task=sensitivity measures the section quantization, which is missing; add"
            " quantization={} for 8 bits"
        )


def draw(found: Sensitivity, path: Path) -> Path:
    """Draw the damage as colours: blocks from left to right, linear layers from top to bottom."""
    pyplot = open_pyplot()
    blocks = 1 + max(int(name.split(".")[1]) for name in found.alone)
    damage = found.damage
    grid = [[damage.get(f"h.{block}.{name}") for block in range(blocks)] for name in LINEARS]
    values = [[float("nan") if value is None else value for value in row] for row in grid]
    limit = max(map(abs, damage.values())) or 1.0
    size = (max(5.0, 2.5 + 0.4 * blocks), 3.2)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set(
        xlabel="block",
        xticks=range(0, blocks, 1 + blocks // 24),
        yticks=range(len(LINEARS)),
        yticklabels=LINEARS,
        title="loss with one layer quantized",
    )
    figure.colorbar(image, label="more than in float (nats per token)", format="%.1e")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
    return path
