"""Outliers: steps whose loss or gradient norm stands out from earlier steps.

The limits follow from a history and are known before a step. This is SkipStepOptimizer of OLMo-core
with one difference: only values above the mean count, since a small loss does no harm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from common.checkpoint.snapshot import TrainState
from common.config.schema import LoggingConfig
from common.log import LOG


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Maximum loss and gradient norm of a step that is not an outlier.

    They are float32 values, so that a device decides like the host.
    """

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        """Return whether a finite value is above its limit. Other values are left to the loss
        scale.
        """
        return math.isfinite(loss) and math.isfinite(grad_norm) and (loss > self.loss or grad_norm > self.grad_norm)


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
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return False
    limits = limits_of(state, config)
    outlier = limits.exceeded(loss, grad_norm)
    if outlier:
        values = (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm))
        found = " and ".join(
            f"{name} {value:.4g} is above {limit:.4g}" for name, value, limit in values if value > limit
        )
        LOG.warning(
            f"step {state.step}: {found}, the mean and {config.outlier_deviations:g} x the"
            f" deviation of {len(state.losses)} steps before" + ("; the update is skipped" if skipped else "")
        )
    state.losses = [*state.losses, loss][-config.outlier_window :]
    state.grad_norms = [*state.grad_norms, grad_norm][-config.outlier_window :]
    return outlier


def _limit(values: list[float], deviations: float) -> float:
    # fsum rounds once, so the limit does not depend on the machine or the order of the sum
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    if deviation == 0.0:  # constant values give no scale for a deviation
        return math.inf
    return float(np.float32(min(mean + deviations * deviation, float(np.finfo(np.float32).max))))
