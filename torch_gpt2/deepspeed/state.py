"""Weights and moments that DeepSpeed holds, read and written whole and by our names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from common.parallel.resolved_run import ResolvedRun
from common.training.snapshot import STATE_NAMES, padded_rows, true_rows
from torch_gpt2.deepspeed.private_api import link_moments
from torch_gpt2.optimizer import global_norm
from torch_gpt2.parallel.world import World

Values = Iterable[tuple[str, NDArray[np.float32]]]


class DeepSpeedState:
    """The state of one rank's stage. Made before DeepSpeed cuts up the parameters, then
    attached.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: ResolvedRun,
        world: World,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.config = config
        self._world = world
        self._device = device
        self._sharded = config.parallel.zero_stage > 0
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._owner: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Of every parameter of the run: the first rank that has it, and its shape."""
        for rank, shapes in enumerate(world.gather(self._shapes)):
            for name, shape in shapes.items():
                self._owner.setdefault(name, (rank, shape))

    def attach(self, engine: Any, utils: Any) -> None:
        """``utils``: deepspeed.utils."""
        self._optimizer, self._basic = engine.optimizer, engine.basic_optimizer
        self._utils = utils

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the moments that the optimizer keeps once it has made a step."""
        optimizer = self.config.optimizer
        return STATE_NAMES[optimizer.name] if optimizer.name != "sgd" or optimizer.momentum else ()

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        """Fill weights before DeepSpeed has the parameters; skip names of other stages."""
        for name, array in values:
            if name in self.parameters:
                self.parameters[name].copy_(self._whole(name, array))

    def fill_masters(self, values: Values) -> None:
        """Fill the float32 copies of weights below float32, made by DeepSpeed of rounded ones."""
        for name, array in values:
            if name in self.parameters:
                self._utils.safe_set_full_fp32_param(
                    self.parameters[name], self._whole(name, array)
                )

    def fill_moments(
        self, values: Iterable[tuple[str, str, NDArray[np.float32]]], updates: int
    ) -> None:
        """Fill moments after the optimizer's first step; before it DeepSpeed has no place for
        them.
        """
        link_moments(self._optimizer)
        for name, part, array in values:
            if name not in self.parameters:
                continue
            parameter, whole = self.parameters[name], self._whole(name, array)
            if self._sharded:
                self._utils.safe_set_full_optimizer_state(parameter, whole, part)
            else:
                self._basic.state[parameter][part].copy_(whole)
        # Adam's bias correction counts updates, torch's beside the moments, DeepSpeed's kernels
        # also in the groups
        for holder in [*self._basic.state.values(), *self._basic.param_groups]:
            if torch.is_tensor(holder.get("step")):
                holder["step"].fill_(float(updates))
            elif "step" in holder:
                holder["step"] = updates

    def norm_of_weights(self) -> float:
        """Return the norm of what this rank holds, where ranks hold whole parameters."""
        return global_norm([parameter.detach() for parameter in self.parameters.values()]).item()

    def norm_of_moments(self) -> float:
        states = (self._basic.state.get(parameter, {}) for parameter in self.parameters.values())
        found = [
            state[part] for state in states for part in self.parts if state.get(part) is not None
        ]
        return global_norm(found).item() if found else 0.0

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return self._collect(self._weight)

    def moments(self) -> dict[str, NDArray[np.float32]]:
        link_moments(self._optimizer)
        found: dict[str, NDArray[np.float32]] = {}
        for part in self.parts:
            collected = self._collect(partial(self._moment, part=part))
            found.update({f"{name}.{part}": array for name, array in collected.items()})
        return found

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        whole: Tensor = (
            self._utils.safe_get_full_fp32_param(parameter) if self._sharded else parameter.detach()
        )
        return whole

    def _moment(self, parameter: nn.Parameter, part: str) -> Tensor:
        state = (
            self._utils.safe_get_full_optimizer_state(parameter, part)
            if self._sharded
            else self._basic.state[parameter][part]
        )
        whole: Tensor = state
        return whole

    def _collect(self, whole: Callable[[nn.Parameter], Tensor]) -> dict[str, NDArray[np.float32]]:
        """Return copies on rank 0, nothing on the others, which must all call.

        One tensor travels at a time.
        """
        rank = self._world.rank
        found: dict[str, NDArray[np.float32]] = {}
        for name, (owner, shape) in self._owner.items():
            values = torch.empty(0)
            if name in self.parameters:
                values = whole(self.parameters[name]).to("cpu", torch.float32)
            if rank == owner and owner:
                dist.send(values.contiguous(), 0)
            elif rank == 0:
                if owner:
                    values = torch.empty(shape)
                    dist.recv(values, owner)
                found[name] = true_rows(name, np.array(values.numpy()), self.config.model)
        return found

    def _whole(self, name: str, array: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(padded_rows(array, self._shapes[name][0])).to(self._device)
