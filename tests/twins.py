"""Small models of random weights, the same on both frameworks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common.config.schema import ModelConfig, PrecisionConfig
from torch_gpt2.model import GPT2


def random_model(*, std: float = 0.3, positions: float | None = 2.0, precision: Any = None, **sizes: Any) -> GPT2:
    """Our model on the CPU, every parameter random: zero biases would hide a missing one.

    positions: deviation of their embedding, since a tied model of random weights repeats itself.
    """
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 48, "vocab_size": 101} | sizes
    usual = {"ffn_hidden_size": 4 * sizes["hidden_size"], "max_positions": sizes["seq_length"]}
    torch.manual_seed(0)
    rows = -(-sizes["vocab_size"] // 16) * 16
    made = GPT2(ModelConfig(**(usual | sizes)), precision or PrecisionConfig(), vocab_rows=rows)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=std)
    if positions is not None:
        torch.nn.init.normal_(made.wpe.weight, std=positions)
    return made


def mindspore_twin(config: Any, one: torch.nn.Module) -> Any:
    """MindSpore's model of a run with the weights of torch's."""
    import mindspore as ms

    from mindformers_gpt2.device import select_device
    from mindformers_gpt2.model import build_model

    other = build_model(config, select_device("cpu"))
    for parameter in other.get_parameters():
        weight = one.get_parameter(parameter.name).detach().numpy()
        ms.ops.assign(parameter, ms.Tensor(weight))
    return other


@contextmanager
def mindspore_mode(mode: str) -> Iterator[Any]:
    """Compute in graphs, or operator by operator (pynative). Gives what compiles a function there."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    try:
        yield ms.jit if mode == "graph" else lambda function: function
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
