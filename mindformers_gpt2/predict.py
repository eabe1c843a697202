"""Continue prompts with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mindspore import Tensor

from common.config.schema import PredictConfig, RunConfig
from common.generation.sampling import choose_token
from common.training import setup
from common.training.data import describe_tokenizer, open_tokenizer
from mindformers_gpt2.checkpoint import load_weights
from mindformers_gpt2.device import MindSporeDevice, open_device
from mindformers_gpt2.model import GPT2, build_model


def predict(config: RunConfig) -> None:
    device = open_device(config)
    tokenizer, config = open_tokenizer(config)
    prompts = setup.encode_prompts(config, tokenizer)
    checkpoint = setup.weights_to_use(config, describe_tokenizer(tokenizer))
    model = build_model(config, device)
    load_weights({parameter.name: parameter for parameter in model.get_parameters()}, config.model, checkpoint)
    for index, prompt in enumerate(prompts):
        generator = np.random.default_rng((config.seed, index))
        new = list(generate(model, prompt, config.predict, tokenizer.eod_id, device, generator))
        setup.print_continuation(prompt.text, tokenizer.decode(new))


def generate(
    model: GPT2, prompt: setup.Prompt, settings: PredictConfig, end_of_text: int, device: MindSporeDevice, generator: np.random.Generator
) -> Iterator[int]:
    """Yield the tokens that follow ``prompt``, up to its ``new_tokens`` or the end of text (not yielded).

    The graph takes one token, the prompt's too, so that it is compiled once and not once a length.
    """
    keys, values = model.new_caches(1, model.config.max_positions or model.config.seq_length)
    decode = device.compile(model.decode)
    seen = np.array(prompt.ids, dtype=np.int64)
    for position in range(len(prompt.ids) + prompt.new_tokens - 1):
        logits, keys, values = decode(_int32([[seen[position]]]), _int32([position]), keys, values)
        if position < len(prompt.ids) - 1:
            continue
        token = choose_token(logits.asnumpy()[0], seen, settings, generator)
        if settings.stop_at_end_of_text and token == end_of_text:
            return
        yield token
        seen = np.append(seen, token)


def _int32(values: object) -> Tensor:
    return Tensor(np.array(values, np.int32))
