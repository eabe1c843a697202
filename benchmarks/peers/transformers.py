"""The step of transformers' Trainer: its training_step for each micro batch, and the clip, update
and exchange of gradients as its loop has them, through accelerate. ``train.compile`` is its
``torch_compile``.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder has names of packages

import torch
from torch import Tensor

from benchmarks.peers.frame import Peer, main
from common.interrupts import end_process


class TransformersTrainer(Peer):
    """accelerate wraps the model in DDP where there are several ranks."""

    name = "transformers"
    packages = ("transformers", "accelerate")

    def prepare(self) -> None:
        from torch.optim.lr_scheduler import LambdaLR
        from transformers import Trainer, TrainingArguments

        config = self.config
        arguments = TrainingArguments(
            output_dir=config.output_dir,
            per_device_train_batch_size=config.train.micro_batch_size,
            gradient_accumulation_steps=config.train.accumulation_steps,
            max_grad_norm=config.optimizer.clip_grad or float("inf"),
            bf16=config.precision.compute == "bfloat16",
            torch_compile=self.compiled,
            use_cpu=self.device.kind == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        constant = LambdaLR(self.optimizer, lambda step: 1.0)  # the frame sets the rate
        self.trainer = Trainer(model=self.model, args=arguments, optimizers=(self.optimizer, constant))
        self.trainer.current_gradient_accumulation_steps = config.train.accumulation_steps
        accelerator = self.trainer.accelerator
        self.wrapped: Any = accelerator.prepare(self.model)
        self.trainer.optimizer = accelerator.prepare(self.optimizer)

    def train_step(self, parts: list[dict[str, Tensor]]) -> tuple[float, float]:
        trainer, accelerator, losses = self.trainer, self.trainer.accelerator, []
        for number, part in enumerate(parts, 1):
            syncing = contextlib.nullcontext() if number == len(parts) else accelerator.no_sync(self.wrapped)
            with syncing:
                losses.append(trainer.training_step(self.wrapped, part))
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), trainer.args.max_grad_norm)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        self.wrapped.zero_grad()
        return torch.stack(losses).sum().item(), float(norm)


if __name__ == "__main__":
    end_process(main(TransformersTrainer))
