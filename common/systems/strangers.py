"""Table of files and tensors that people bring, each with its answer: wrappers, other heads, and
what holds no weights of a GPT-2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

NANOGPT = (
    "it is nanoGPT's, whose GELU is the exact one since 2023, and the file does not say which"
    " it has; the models here have GPT-2's (tanh), so logits would differ. If that may be, load its weights into"
    " transformers' GPT2LMHeadModel, those of Linear transposed, and give what save_pretrained writes"
)
UNDER_DEEPSPEED = (
    "is a Hugging Face model that was trained below DeepSpeed; run DeepSpeed's own"
    " python {root}/zero_to_fp32.py {root} OUTPUT, put config.json and the tokenizer into OUTPUT, and give that"
)
_PEFT = (
    "it is an adapter of PEFT, which changes a model that is elsewhere; call merge_and_unload() of"
    " peft, then save_pretrained, and give that folder"
)
_OTHER_FRAMEWORK = (
    "it has weights for {0} only; open it with transformers 4 (from_pretrained(FOLDER, from_{1}="
    "True)), call save_pretrained, and give that folder"
)
_OPENAI = (
    "it is OpenAI's own TensorFlow checkpoint; their four models are on the Hugging Face hub, such as"
    " hf://openai-community/gpt2. Convert one that you trained with transformers 4: python -m"
    " transformers.models.gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch --gpt2_checkpoint_path model.ckpt"
    " --gpt2_config_file config.json --pytorch_dump_folder_path OUTPUT, put the tokenizer into OUTPUT, and give that"
)
_ALONE = (
    "its weights lack config.json (transformers') or manifest.json (ours), which say heads and"
    " vocabulary; put it beside them"
)
_PLACES = {
    "adapter_config.json": _PEFT,
    "adapter_model.*": _PEFT,
    "hparams.json": _OPENAI,
    "*.ckpt.index": _OPENAI,
    "tf_model.h5": _OTHER_FRAMEWORK.format("TensorFlow", "tf"),
    "flax_model.msgpack": _OTHER_FRAMEWORK.format("Flax", "flax"),
    "ckpt.pt": NANOGPT,
    "model.safetensors": _ALONE,
    "pytorch_model.bin": _ALONE,
}
"""File that is given, or in the folder that is given -> what it is, and what to do.

Sources: peft's save_pretrained, transformers 4's TF2_WEIGHTS_NAME and FLAX_WEIGHTS_NAME, its
convert_gpt2_original_tf_checkpoint_to_pytorch.py, and nanoGPT's train.py and model.py.
"""
_WRAPPERS = (
    "module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "state_dict", "model",
    "model_state_dict",
)  # fmt: skip
"""Modules and dictionaries around a model: of DistributedDataParallel, torch.compile, Lightning
(Fabric and .ckpt), FSDP, and scripts.
"""
_BESIDE = {
    r"v_head\..+": "head for values, as TRL trains",
    r"(score|classifier|qa_outputs)\..+|multiple_choice_head\..+": "head of a classifier",
}
"""Tensors beside a language model that it does not use, as a regular expression -> what they are.

Sources: trl's modeling_value_head.py, and modeling_gpt2.py of transformers 5.
"""
OTHER_HEAD = "lm_head.decoder.weight"
"""Another name of the head: DialoGPT's."""


def stranger_at(path: Path) -> str | None:
    """Return what is at a path where no weights of a known format are, and what to do; None where nothing is known."""
    names = [path.name] if path.is_file() else [file.name for file in path.glob("*")]
    found = (say for mark, say in _PLACES.items() if any(fnmatch(name, mark) for name in names))
    return next(found, None)


def wrapper_of(names: Iterable[str], known: str) -> str:
    """Return what wrappers have put before a name that ends in ``known``, such as ``module.``."""
    wrapped = re.compile(rf"((?:(?:{'|'.join(_WRAPPERS)})\.)+)(?:transformer\.)?{re.escape(known)}")
    found = (match[1] for name in names if (match := wrapped.fullmatch(name)))
    return next(found, "")


def beside_model(name: str) -> str | None:
    """Return what a tensor is that a language model does not use, None for all others."""
    return next((why for mark, why in _BESIDE.items() if re.fullmatch(mark, name)), None)
