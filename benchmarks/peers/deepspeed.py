"""deepspeed.initialize around transformers' GPT-2: ZeRO 0 to 3, as DeepSpeed's tutorials train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder has names of packages

import torch
from torch import Tensor

from benchmarks.peers.frame import Peer, main
from common.interrupts import end_process
from torch_gpt2.deepspeed.engine import open_deepspeed


class DeepSpeed(Peer):
    """DeepSpeed averages gradients over micro batches and ranks, clips and updates."""

    name = "deepspeed"
    packages = ("transformers", "deepspeed")
    has_zero = True

    def prepare(self) -> None:
        config = self.config
        deepspeed = open_deepspeed(config, self.device, self.process)
        settings = {
            "train_batch_size": config.train.global_batch_size,
            "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
            "gradient_accumulation_steps": config.train.accumulation_steps,
            "gradient_clipping": config.optimizer.clip_grad,
            "zero_optimization": {"stage": config.parallel.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine: Any
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=settings
        )

    def train_step(self, parts: list[dict[str, Tensor]]) -> tuple[float, float]:
        total, norm = 0.0, 0.0
        for number, part in enumerate(parts, 1):
            with self.autocast:
                loss = self.engine(**part).loss
            self.engine.backward(loss)
            if number == len(parts) and not self.config.parallel.zero_stage:
                gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
                norm = torch.nn.utils.get_total_norm(gradients).item()
            self.engine.step()
            total += loss.item() / len(parts)
        return total, norm or float(self.engine.get_global_grad_norm())


if __name__ == "__main__":
    end_process(main(DeepSpeed))
