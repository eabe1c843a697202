"""DeepSpeed's step, with stand-ins: what the host reads during it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.host_waits import READS
from torch_gpt2.deepspeed.engine import DeepSpeedEngine


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        self.found[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


def test_a_step_reads_its_losses_once() -> None:
    """Four micro batches have mean losses of 1 to 4."""
    losses = iter(torch.arange(1.0, 5.0).unbind())

    class Wrapped:
        def train(self) -> None: ...
        def backward(self, loss: torch.Tensor) -> None: ...
        def step(self) -> None: ...
        def __call__(self, ids: Any, targets: Any) -> torch.Tensor:
            return next(losses)

    state = SimpleNamespace(begin_step=lambda scale: None, norm=lambda: 0.5)
    engine: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{}]),
        config=SimpleNamespace(train=SimpleNamespace(micro_batch_size=2)),
        device=SimpleNamespace(torch_device=torch.device("cpu")),
        world=SimpleNamespace(size=1, sum=lambda *values: values),
        predicted=lambda tokens: 8,
        _pairs=lambda pieces: [(None, None)] * len(pieces),
        _state=state,
        _ranks=1,
        _engine=Wrapped(),
        _pipeline=False,
    )
    with Reads() as reads:
        found = DeepSpeedEngine._update(engine, np.zeros((8, 17), np.int32), 0.1, 1.0)
    assert found == (2.5, 0.5)
    assert sum(reads.found[name] for name in READS) == 1
