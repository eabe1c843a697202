"""DeepSpeed's step, with stand-ins: what the host reads during it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.host_waits import READS
from torch_gpt2.deepspeed.engine import DeepSpeedEngine


def test_a_step_reads_its_losses_once() -> None:
    """Four micro batches have mean losses of 1 to 4."""
    found = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            found.append(function.overloadpacket.__name__)
            return function(*arguments, **(options or {}))

    engine: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{}]),
        config=SimpleNamespace(train=SimpleNamespace(micro_batch_size=2)),
        device=SimpleNamespace(torch_device=torch.device("cpu")),
        world=SimpleNamespace(size=1, sum=lambda *values: values),
        predicted=lambda tokens: 8,
        _pairs=lambda pieces: [(None, None)] * len(pieces),
        _state=Mock(norm=lambda: 0.5),
        _ranks=1,
        _engine=Mock(side_effect=torch.arange(1.0, 5.0).unbind()),
        _pipeline=False,
    )
    with Reads():
        result = DeepSpeedEngine._update(engine, np.zeros((8, 17), np.int32), 0.1, 1.0)
    assert result == (2.5, 0.5)
    assert len([name for name in found if name in READS]) == 1
