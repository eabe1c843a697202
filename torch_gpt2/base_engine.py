"""Base of torch's engines: the start of a run, and the frame of a snapshot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.snapshot import EngineState, TrainState, make_snapshot, owned_pieces
from common.checkpoint.writer import Part, Snapshot
from common.cluster.environment import ALONE, Process
from common.dataset.sampler import Tokens
from common.errors import CheckpointError
from common.parallel.run import Run
from common.parallel.updates import LossScale
from common.tensor_files.safetensors_file import Tensors
from common.training import engine
from common.training.opened_checkpoint import Checkpoint
from common.training.start import Start
from common.weights.pieces import TensorSlice
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import attention_kernel
from torch_gpt2.optimizer import global_norm, held_bytes, local_shard
from torch_gpt2.parallel.layout import GradientSync, seed_offset
from torch_gpt2.parallel.world import World
from torch_gpt2.quantize import Quantization


class BaseEngine(engine.Engine):
    """An engine of one rank."""

    steps_per_run = 1
    versions: Mapping[str, str] = {}
    """Versions of further packages that compute, for the manifest."""
    parameters: Mapping[str, nn.Parameter]
    tensors: Mapping[str, Tensor]
    """The tensors that the optimizer updates: the parameters, or float32 copies."""
    optimizer: torch.optim.Optimizer
    pieces: dict[str, TensorSlice]
    """Part of each parameter that this rank holds."""
    _gradient_sync: GradientSync

    def __init__(
        self,
        config: Run,
        device: TorchDevice,
        process: Process = ALONE,
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
        self.loss_scale = LossScale(config.loss_scale)
        self.quantization: Quantization | None = None
        self._build(process)

    @abstractmethod
    def _build(self, process: Process) -> None:
        """Make the model, and what updates it."""

    @abstractmethod
    def _fill_weights(self, reader: Checkpoint | None) -> None:
        """Load the weights of a checkpoint, or the initial ones."""

    @abstractmethod
    def _fill_moments(self, reader: Checkpoint, optimizer_steps: int) -> None:
        """Load the optimizer's state of a checkpoint."""

    def begin(self, start: Start) -> TrainState:
        reader = start.checkpoint
        states = reader.states(self.config, self.loss_scale) if reader and start.resume else None
        self._fill_weights(reader)
        if reader is not None and self.quantization is not None:
            self.quantization.load(reader)
        self.device.seed(self.config.seed + seed_offset(self.config, self.world))
        state, saved = states or (TrainState(), None)
        self.schedule = engine.Schedule(self.config.optimizer, state)
        if reader is None or saved is None:
            return state
        self._fill_moments(reader, saved.optimizer_steps)
        try:
            generators = saved.rng.get("torch", [])
            if len(generators) == self.world.size:  # with another number of ranks the dropout masks differ anyway
                self.device.set_rng_state(generators[self.world.rank])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{reader}: the state of the random generators is broken ({error}); use another checkpoint"
            ) from None
        self.step = state.step
        return state

    def kernels(self) -> dict[str, str]:
        float8, float8_head = self.config.precision.float8, self.config.precision.float8_head
        return {
            "attention": attention_kernel(self.config, self.device),
            **({} if float8 == "none" else {"linear layers": f"torchao's float8, {float8}"}),
            **({"head": "float8"} if float8_head else {}),
            "layer norm": f"native_layer_norm in {self.config.precision.layer_norm}",
            "optimizer": self._optimizer_kernel(),
        }

    @abstractmethod
    def _optimizer_kernel(self) -> str:
        """Return what updates the weights, for the log."""

    def local_weights(self) -> dict[str, Tensor]:
        """Return what this rank holds of the weights that the optimizer updates."""
        return {name: local_shard(tensor.detach()) for name, tensor in self.tensors.items()}

    def norm_of_weights(self) -> float:
        return global_norm(list(self.local_weights().values())).item()

    def norm_of_moments(self) -> float:
        states = (self.optimizer.state.get(tensor, {}) for tensor in self.tensors.values())
        parts = self.config.optimizer.state_parts
        found = [local_shard(state[part]) for state in states for part in parts if state.get(part) is not None]
        return global_norm(found).item() if found else 0.0

    def state_bytes(self) -> int:
        states, groups = self.optimizer.state, self.optimizer.param_groups
        found = [value for state in states.values() for value in state.values() if torch.is_tensor(value)]
        # in DeepSpeed's stage 3 the groups are empty between steps
        copies = [*states, *(each for group in groups for each in group["params"])]
        weights = [getattr(each, "ds_tensor", each) for each in self.parameters.values()]
        return held_bytes([*weights, *copies, *found])

    def predicted(self, tokens: Tokens) -> int | Tensor:
        """Return the number of tokens of the global batch whose losses count.

        Where some do not, the ranks add up theirs. tokens: those of this rank.
        """
        packing, topology = self.config.packing, self.world.topology
        if packing is None or not packing.masks_loss:
            return len(tokens) * topology.data * (tokens.shape[1] - 1)
        own = torch.full((), packing.counted(tokens), device=self.device.torch_device)
        copies = topology.tensor * topology.pipeline  # ranks with the same tokens
        return (self.world.total(own.float()) / copies).clamp(min=1.0).float()

    @abstractmethod
    def _on_host(self, owned: dict[str, TensorSlice]) -> tuple[Tensors, Tensors, int]:
        """Copy pieces of weights and moments to the host; return them, and the number of updates. Every rank calls."""

    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Copy what this rank writes to the host.

        A device copies before it starts the next step. The writer waits for it, not the training.
        No earlier snapshot may be under way.
        """
        generators = self.world.gather(self.device.rng_state())
        sync, is_sharded = self._gradient_sync, not self._gradient_sync.alone  # so that each rank writes its own part
        writes = is_sharded or self.world.rank == 0
        owned = owned_pieces(self.pieces, sync.owns, self.config.model) if writes else {}
        weights, moments, steps = self._on_host(owned)
        if not writes:
            return None
        snapshot = make_snapshot(
            self.config,
            state,
            weights=weights,
            moments=moments,
            engine=EngineState(
                optimizer_steps=steps,
                loss_scale=self.loss_scale.state(),
                rng={"torch": generators},
                quantization=self.quantization.scales.state() if self.quantization else {},
            ),
            versions={"backend": "torch", "torch": torch.__version__, **self.versions},
            extra=self.manifest_extra,
            part=Part(rank=self.world.rank, ranks=self.world.size, rectangles=owned) if is_sharded else None,
        )
        return replace(snapshot, ready=self.device.mark())
