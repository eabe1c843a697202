"""Loss and perplexity of a checkpoint on the validation windows."""

from __future__ import annotations

from common.config.schema import RunConfig
from common.training import setup
from common.training.data import open_data
from mindformers_gpt2.checkpoint import load_weights
from mindformers_gpt2.device import open_device
from mindformers_gpt2.engine import Engine
from mindformers_gpt2.model import build_model


def evaluate(config: RunConfig) -> None:
    device = open_device(config)
    data, config = open_data(config, training=False)
    checkpoint = setup.weights_to_use(config, data.tokenizer_record)
    model = build_model(config, device)
    load_weights({parameter.name: parameter for parameter in model.get_parameters()}, config.model, checkpoint)
    total, tokens = Engine(model, config, device).evaluate(data.require_validation())
    setup.report_evaluation(config, checkpoint, total, tokens)
