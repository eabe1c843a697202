"""A plain loop around transformers' GPT-2, as nanoGPT's train.py is: autocast, micro batches of
which the last exchanges gradients (DDP), clip, fused AdamW; ``train.compile`` compiles the model.

The table keeps transformers' 50257 rows, which nanoGPT pads to 50304 for a GPU's sake.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder has names of packages

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.frame import Peer, main
from common.interrupts import end_process


class NanoGPTStyle(Peer):
    """DDP where there are several ranks."""

    name = "nanogpt_style"

    def prepare(self) -> None:
        model = torch.compile(self.model) if self.compiled else self.model
        self.forward: Any = DistributedDataParallel(model) if self.world.size > 1 else model

    def train_step(self, parts: list[dict[str, Tensor]]) -> tuple[float, float]:
        losses = []
        for number, part in enumerate(parts, 1):
            if self.world.size > 1:
                self.forward.require_backward_grad_sync = number == len(parts)
            with self.autocast:
                loss = self.forward(**part).loss / len(parts)
            losses.append(loss.detach())
            loss.backward()
        limit = self.config.optimizer.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().item(), norm.item()


if __name__ == "__main__":
    end_process(main(NanoGPTStyle))
