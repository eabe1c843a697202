"""Frame of a study's peers: their programs take run_gpt2.py's arguments, and train transformers'
GPT-2 from our initial weights on our batches. Loop, metrics and traces are our own, so that a
step's time and memory are measured in one way. Only the step is the peer's.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import initial_weights
from common.backends import make_run
from common.checkpoint.snapshot import TrainState
from common.cluster.environment import Process, find_process, torch_variables
from common.command_line import parse_arguments
from common.dataset.sampler import Batch, Tokens
from common.errors import ConfigError, GPT2Error, report
from common.log import start_log
from common.parallel.run import Run
from common.parallel.updates import learning_rate
from common.paths import require_package
from common.processes.heartbeat import start_heartbeat
from common.run_config import load_config
from common.systems.hugging_face.weights import NAME_MAPS, write_config
from common.systems.weights import export_names
from common.training import engine
from common.training.engine import NO_LIMITS, Limits, StepResult
from common.training.start import Start
from torch_gpt2.compilation import is_compiled
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.optimizer import global_norm, held_bytes
from torch_gpt2.parallel.world import World
from torch_gpt2.train import train

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


class Peer(engine.Engine):
    """transformers' GPT-2 and torch's AdamW, with float32 weights and autocast below float32."""

    name: str
    packages: Sequence[str] = ("transformers",)
    has_zero = False
    steps_per_run = 1

    def __init__(
        self, config: Run, device: TorchDevice, process: Process, world: World, manifest_extra: Mapping[str, Any]
    ) -> None:
        self.config, self.device, self.process, self.world = config, device, process, world
        self.step = 0
        os.environ.update(torch_variables(process))
        self.model: nn.Module = hugging_face_model(config).to(device.torch_device).train()
        settings = config.optimizer
        # matrices and tables decay, biases and layer norms do not: the groups of this toolkit, nanoGPT and transformers
        matrices = [each for each in self.model.parameters() if each.dim() >= 2]
        vectors = [each for each in self.model.parameters() if each.dim() < 2]
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[settings.name](
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=device.fused_optimizer or None,
        )
        low = config.precision.compute
        self.autocast = torch.autocast(device.torch_device.type, DTYPES[low], enabled=low != "float32")
        self.compiled = is_compiled(config, device)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Put the peer around ``model`` and ``optimizer``."""

    @abstractmethod
    def train_step(self, parts: list[dict[str, Tensor]]) -> tuple[float, float]:
        """Make one optimizer step of micro batches, each the model's arguments. Returns their mean loss, and the
        gradients' norm before clipping.
        """

    def begin(self, start: Start) -> TrainState:
        if start.resume is not None or start.weights is not None:
            raise ConfigError(
                f"peer {self.name}: starts only from initial weights; leave checkpoint.resume,"
                " checkpoint.init_from out, and take a new output_dir"
            )
        self.device.seed(self.config.seed + self.world.rank)
        return TrainState()

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        self.model.train()
        results = []
        for batch in itertools.islice(batches, steps):
            rate = learning_rate(self.config.optimizer, self.step)
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            micro, parts = self.config.train.micro_batch_size, []
            for start in range(0, len(batch.tokens), micro):
                ids, targets = inputs_and_targets(batch.tokens[start : start + micro], self.device)
                parts.append({"input_ids": ids, "labels": targets, "shift_labels": targets})
            loss, norm = self.train_step(parts)
            mean = self.world.sum(loss)[0] / self.world.size
            results.append(StepResult(loss=mean, grad_norm=norm, learning_rate=rate, loss_scale=1.0, skipped=False))
        return results

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches:
            if len(batch):
                ids, targets = inputs_and_targets(batch, self.device)
                with self.autocast:
                    loss = self.model(input_ids=ids, labels=targets, shift_labels=targets).loss
                total += loss.item() * targets.numel()
                count += targets.numel()
        total, tokens = self.world.sum(total, count)
        return total, int(tokens)

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        found = [value for state in states for value in state.values() if torch.is_tensor(value)]
        return held_bytes([*self.model.parameters(), *found])

    def norm_of_weights(self) -> float:
        return global_norm([each.detach() for each in self.model.parameters()]).item()

    def norm_of_moments(self) -> float:
        return 0.0  # none before the first step

    def snapshot(self, state: TrainState) -> None:
        """Peers leave no checkpoint."""


def hugging_face_model(config: Run) -> nn.Module:
    """Return transformers' model with our initial weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), initial_weights(config))
        model = GPT2LMHeadModel(GPT2Config.from_pretrained(folder, use_cache=False))
    state = model.state_dict()
    named = export_names(NAME_MAPS[0], initial_weights(config).tensors, config.model, None)
    if set(named) | {"lm_head.weight"} != set(state):
        raise ConfigError("this version of transformers has other parameters; install 5.x")
    with torch.no_grad():
        for name, weight in named.items():
            state[name].copy_(torch.from_numpy(weight.load().copy()))
    if config.train.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    return model


def refuse(config: Run, peer: type[Peer]) -> None:
    """Raise ConfigError for what the peer has not."""
    parallel, precision = config.parallel, config.precision
    for package in peer.packages:
        require_package(package, extra="peers", purpose=f"which the peer {peer.name} needs", load=False)
    wrong = {
        f"backend={config.backend}": config.backend != "torch",
        f"engine={config.engine}": config.engine != "native",
        f"parallel.model_parallel={parallel.model_parallel}": parallel.model_parallel > 1,
        f"parallel.pipeline_stage={parallel.pipeline_stage}": parallel.pipeline_stage > 1,
        f"parallel.zero_stage={parallel.zero_stage}": bool(parallel.zero_stage) and not peer.has_zero,
        f"precision.parameters={precision.parameters}": precision.parameters != "float32",
        f"precision.compute={precision.compute}": precision.compute == "float16",
        f"optimizer.name={config.optimizer.name}": config.optimizer.name not in OPTIMIZERS,
        "train.recompute=selective": config.train.recompute == "selective",
        f"train.on_outlier={config.train.on_outlier}": config.train.on_outlier != "warn",
        "quantization": config.quantization is not None,
    }
    if found := [setting for setting, refused in wrong.items() if refused]:
        raise ConfigError(
            f"peer {peer.name}: {', '.join(found)}: it has data parallel, float32 or bf16 with"
            " float32 weights, recomputation of whole blocks or none, adamw and adam; choose these"
        )


def main(peer: type[Peer], words: list[str] | None = None) -> int:
    """Run a peer as run_gpt2.py runs the toolkit, and return the exit code."""
    start_heartbeat()
    try:
        arguments = parse_arguments(words, program=f"benchmarks/peers/{peer.name}.py")
        process = find_process(os.environ)
        start_log(rank=process.rank)
        written = load_config(arguments.config, arguments.overrides)
        config, inputs = make_run(written, arguments.run_mode, process)
        refuse(config, peer)
        train(config, inputs, process, engines={"native": peer})
    except (GPT2Error, OSError) as error:
        return report(error)
    return 0
