"""Counter of the graphs that torch.compile makes while a rank trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import torch_gpt2.compilation


@contextmanager
def watch(note: Path) -> Iterator[None]:
    """Writes {"forward": graphs of forward passes, "backward": graphs of backward passes, "breaks":
    places where a graph had to end}. Graphs run operator by operator.
    """
    counts = {"forward": 0, "backward": 0}

    def counting(kind: str) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            counts[kind] += 1
            return make_boxed_func(graph.forward)

        return compile_graph

    torch._dynamo.reset()
    counters.clear()
    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    with patch.object(torch_gpt2.compilation, "BACKEND", backend):
        yield
    counts["breaks"] = sum(counters["graph_break"].values())
    note.write_text(json.dumps(counts))
