"""Continue prompts with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from common.config.schema import PredictConfig, RunConfig
from common.generation.sampling import choose_token
from common.training import setup
from common.training.data import describe_tokenizer, open_tokenizer
from torch_gpt2.checkpoint import load_weights
from torch_gpt2.device import TorchDevice, open_device
from torch_gpt2.model import GPT2, build_model


def predict(config: RunConfig) -> None:
    device = open_device(config)
    tokenizer, config = open_tokenizer(config)
    prompts = setup.encode_prompts(config, tokenizer)
    checkpoint = setup.weights_to_use(config, describe_tokenizer(tokenizer))
    model = build_model(config, device)
    load_weights(dict(model.named_parameters()), config.model, checkpoint)
    for index, prompt in enumerate(prompts):
        generator = np.random.default_rng((config.seed, index))
        new = list(generate(model, prompt, config.predict, tokenizer.eod_id, device, generator))
        setup.print_continuation(prompt.text, tokenizer.decode(new))


@torch.no_grad()
def generate(
    model: GPT2, prompt: setup.Prompt, settings: PredictConfig, end_of_text: int, device: TorchDevice, generator: np.random.Generator
) -> Iterator[int]:
    """Yield the tokens that follow ``prompt``, up to its ``new_tokens`` or the end of text (not yielded)."""
    model.eval()
    caches = model.new_caches(1, len(prompt.ids) + prompt.new_tokens)
    seen = np.array(prompt.ids, dtype=np.int64)
    ids = torch.tensor([prompt.ids], device=device.torch_device)
    for _ in range(prompt.new_tokens):
        logits = model.logits(model(ids, caches)[0, -1])
        token = choose_token(logits.cpu().numpy(), seen, settings, generator)
        if settings.stop_at_end_of_text and token == end_of_text:
            return
        yield token
        seen = np.append(seen, token)
        ids = torch.tensor([[token]], device=device.torch_device)
