"""Weights and moments of a rank under DeepSpeed, read and written by our names.

Without ZeRO a rank holds the parameters of its layout whole, and steps as the native engine does.
With ZeRO, DeepSpeed splits them over the data-parallel ranks and gathers them on request.
"""

from __future__ import annotations

import importlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.checkpoint.snapshot import padded_rows
from common.parallel.run import Run
from common.parallel.sharding import initial_values, slices_of_rank
from common.parallel.updates import clip_factor
from common.training.opened_checkpoint import Checkpoint
from common.weights.pieces import Array, TensorSlice, shape_of
from torch_gpt2.deepspeed.private_api import link_moments
from torch_gpt2.device import DTYPES
from torch_gpt2.optimizer import MasterWeights, scale_gradients
from torch_gpt2.parallel.layout import GradientSync
from torch_gpt2.parallel.world import World


class DeepSpeedState(ABC):
    """Tensors that one rank's optimizer updates.

    It is created before DeepSpeed has the parameters, and attached to its engine afterwards.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Run, world: World) -> None:
        """Create a state. layout: the run without ZeRO, since DeepSpeed gathers the parameters that it has split."""
        self.tensors: dict[str, Tensor] = dict(parameters)
        """The tensors that the optimizer is given."""
        self.config = layout
        self.pieces = slices_of_rank(layout, world.topology, world.at, parameters)
        self.sync = GradientSync(layout, world)

    def attach(self, engine: Any, reader: Checkpoint | None) -> None:
        """Attach DeepSpeed's engine. reader: as in ``fill``, for the float32 copies."""
        self._engine, self.basic_optimizer = engine, engine.basic_optimizer

    @abstractmethod
    def begin_step(self, scale: float) -> None:
        """Set the loss scale of the next step."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss itself, with its gradient scaled if DeepSpeed does not scale it."""
        return loss

    @abstractmethod
    def norm(self) -> float:
        """Return the norm of the last step's gradients before the clip."""

    @torch.no_grad()
    def fill(self, reader: Checkpoint | None) -> None:
        """Load the weights of a checkpoint, or the initial ones, before DeepSpeed has the parameters."""
        for name, values in self._values(reader):
            self.tensors[name].copy_(values)

    @abstractmethod
    def _set_moment(self, name: str, part: str, whole: Tensor) -> None: ...

    @abstractmethod
    def _whole(self, name: str, part: str | None) -> Tensor:
        """Return a part of the optimizer's state, or the weight for None."""

    def fill_moments(self, values: Iterable[tuple[str, str, Array]], updates: int) -> None:
        """Fill moments after the optimizer's first step. Before it DeepSpeed has no place for them."""
        for name, part, array in values:
            self._set_moment(name, part, self._padded(name, array))
        # Adam's bias correction counts updates, torch's beside the moments, DeepSpeed's kernels also in the groups
        for holder in [*self.basic_optimizer.state.values(), *self.basic_optimizer.param_groups]:
            if torch.is_tensor(holder.get("step")):
                holder["step"].fill_(float(updates))
            elif "step" in holder:
                holder["step"] = updates

    def weights(self, owned: Mapping[str, TensorSlice]) -> dict[str, Array]:
        """Return copies of pieces. All ranks must call: DeepSpeed gathers."""
        return self._copied(owned, [None])

    def moments(self, owned: Mapping[str, TensorSlice]) -> dict[str, Array]:
        """Return copies of pieces by NAME.PART. All ranks must call."""
        return self._copied(owned, self.config.optimizer.state_parts)

    def _copied(self, owned: Mapping[str, TensorSlice], parts: Iterable[str | None]) -> dict[str, Array]:
        found = {}
        for part, name in itertools.product(parts, self.tensors):
            whole = self._whole(name, part)
            if name in owned:
                values = whole.to("cpu", torch.float32).view(shape_of(self.pieces[name]))
                key = name if part is None else f"{name}.{part}"
                found[key] = np.array(values[: shape_of(owned[name])[0]].numpy())
        return found

    def _values(self, reader: Checkpoint | None) -> Iterable[tuple[str, Tensor]]:
        """Yield this rank's pieces of a checkpoint's weights, or of the initial ones."""
        config, pieces = self.config, self.pieces
        arrays = reader.weights(config.model, pieces) if reader else initial_values(config, pieces)
        return ((name, self._padded(name, array)) for name, array in arrays)

    def _padded(self, name: str, array: Array) -> Tensor:
        return torch.from_numpy(padded_rows(array, shape_of(self.pieces[name])[0]))


class WholeState(DeepSpeedState):
    """State without ZeRO, where DeepSpeed steps with the bare optimizer.

    Left to itself, DeepSpeed would ignore the loss scale and apply gradients that are not finite.
    It would not clip float32 gradients in a pipeline, and would sum half-precision gradients in
    that precision. So its optimizer gets float32 tensors, and hooks around the step do the rest.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Run, world: World) -> None:
        super().__init__(parameters, layout, world)
        self.master = MasterWeights(parameters, DTYPES[layout.precision.reduction])
        self.tensors = self.master.tensors
        self._scale, self._norm = 1.0, 0.0

    def attach(self, engine: Any, reader: Checkpoint | None) -> None:
        super().attach(engine, reader)
        self.basic_optimizer.register_step_pre_hook(lambda *_: self._unscale_and_clip())
        self.basic_optimizer.register_step_post_hook(lambda *_: self.master.write_back())
        self.basic_optimizer.register_step_post_hook(lambda *_: self._drop_gradients())

    def begin_step(self, scale: float) -> None:
        self._scale = scale

    def scaled(self, loss: Tensor) -> Tensor:
        if loss.requires_grad:
            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * self._scale
            )
        return loss

    def norm(self) -> float:
        return self._norm

    def _unscale_and_clip(self) -> None:
        """Unscale and clip the gradients that DeepSpeed has summed. The norm counts each element once."""
        gradients = self.master.take_gradients()
        self._norm = self.sync.norm(gradients).item() / self._scale
        limit = self.config.optimizer.clip_grad
        scale_gradients(list(gradients.values()), clip_factor(self._norm, limit) / self._scale)
        if not math.isfinite(self._norm):
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    def fill(self, reader: Checkpoint | None) -> None:
        super().fill(reader)
        self.master.write_back()

    def _set_moment(self, name: str, part: str, whole: Tensor) -> None:
        self._whole(name, part).copy_(whole)

    def _whole(self, name: str, part: str | None) -> Tensor:
        tensor = self.tensors[name]
        whole: Tensor = tensor.detach() if part is None else self.basic_optimizer.state[tensor][part]
        return whole


class ZeroState(DeepSpeedState):
    """State with ZeRO, where DeepSpeed's optimizer scales, sums, clips and steps."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Run, world: World) -> None:
        super().__init__(parameters, layout, world)
        if layout.precision.reduction == "float32":
            for parameter in parameters.values():
                parameter.grad_dtype = torch.float32  # autograd would round each sum

    def begin_step(self, scale: float) -> None:
        if self.config.loss_scale.mode != "none":
            self._optimizer.override_loss_scale(scale)

    def norm(self) -> float:
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm) and self.config.deepspeed.offload_optimizer:
            # DeepSpeed 0.19 would add the next gradients to these
            self._optimizer.averaged_gradients = dict.fromkeys(self._optimizer.averaged_gradients)
        return norm

    def attach(self, engine: Any, reader: Checkpoint | None) -> None:
        super().attach(engine, reader)
        self._optimizer = engine.optimizer
        self._utils = importlib.import_module("deepspeed.utils")
        if self.config.precision.parameters != "float32":  # DeepSpeed's copies were made from rounded weights
            for name, values in self._values(reader):
                self._utils.safe_set_full_fp32_param(self.tensors[name], self._there(name, values))

    def fill_moments(self, values: Iterable[tuple[str, str, Array]], updates: int) -> None:
        link_moments(self._optimizer)
        super().fill_moments(values, updates)

    def _set_moment(self, name: str, part: str, whole: Tensor) -> None:
        self._utils.safe_set_full_optimizer_state(self.tensors[name], self._there(name, whole), part)

    def moments(self, owned: Mapping[str, TensorSlice]) -> dict[str, Array]:
        link_moments(self._optimizer)
        return super().moments(owned)

    def _there(self, name: str, values: Tensor) -> Tensor:
        return values.to(self.tensors[name].device)

    def _whole(self, name: str, part: str | None) -> Tensor:
        if part is None:
            whole: Tensor = self._utils.safe_get_full_fp32_param(self.tensors[name])
        else:
            whole = self._utils.safe_get_full_optimizer_state(self.tensors[name], part)
        return whole
