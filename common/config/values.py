"""Values of keys that other code reads too: kinds of tokenizers, parts of a data set, number types, update rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from common.errors import DataError

TokenizerKind = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "BertWordLevel",
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
]

TOKENIZER_ALIASES: dict[str, TokenizerKind | None] = {
    "GPT2Tokenizer": "GPT2BPETokenizer",
    "GPT2TokenizerFast": "GPT2BPETokenizer",
    "BertTokenizerFast": "BertWordPieceLowerCase",
    "BertTokenizer": "BertWordPieceLowerCase",
    "BertTokenizerLegacy": "BertWordPieceLowerCase",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "LlamaTokenizer": "SentencePieceTokenizer",
    "PreTrainedTokenizerFast": "HuggingFaceTokenizer",
    "TokenizersBackend": "HuggingFaceTokenizer",
    "AutoTokenizer": None,
}
"""Other name -> kind; None means that the files decide."""
TOKENIZER_NAMES = (*get_args(TokenizerKind), *TOKENIZER_ALIASES)


def kind_named(value: Any) -> Any:
    """Return the kind that a name stands for; any other value is returned unchanged."""
    return TOKENIZER_ALIASES.get(value, value) if isinstance(value, str) else value


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``"949,50,1"`` or ``"949/50/1"`` into weights of train, valid and test. Missing ones
    are 0. Raises DataError.

    Source of both forms: Megatron-LM, parse_and_normalize_split of
    megatron/core/datasets/blended_megatron_dataset_config.py.
    """
    try:
        values = [float(part) for part in text.split("," if "," in text else "/")]
    except ValueError:
        raise DataError(f"{text!r}: expected numbers with commas between, for example 949,50,1") from None
    if len(values) > 3:
        raise DataError(f"{text!r}: has {len(values)} weights, expected up to 3: train,valid,test")
    train, valid, test = (*values, 0.0, 0.0)[:3]
    return check_weights((train, valid, test))


def check_weights(weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the weights. Raises DataError unless they are three finite numbers >= 0 with a positive sum."""
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise DataError(
            f"split weights {list(weights)}: expected three numbers >= 0, not all 0, for train,"
            " valid and test, like 949,50,1"
        )
    return float(weights[0]), float(weights[1]), float(weights[2])


PRECISION_PRESETS: dict[str, dict[str, str]] = {
    "float32": dict.fromkeys(("parameters", "compute", "reduction", "softmax", "layer_norm"), "float32")
}
PRECISION_PRESETS["bf16"] = PRECISION_PRESETS["float32"] | {"compute": "bfloat16"}
PRECISION_PRESETS["fp16"] = PRECISION_PRESETS["float32"] | {"compute": "float16"}
PRECISION_PRESETS["fp8"] = PRECISION_PRESETS["bf16"] | {"float8": "tensorwise"}
PRECISION_PRESETS["O2"] = PRECISION_PRESETS["fp16"] | {"parameters": "float16"}
PRECISION_PRESETS["pure_fp16"] = PRECISION_PRESETS["O2"] | dict.fromkeys(("softmax", "layer_norm"), "float16")
_PRECISION_NAMES = {"fp32": "float32", "O0": "float32", "bfloat16": "bf16", "float16": "fp16", "O1": "fp16"}


def expand_precision(value: Any) -> Any:
    """Turn a preset's name into the mapping that it stands for."""
    if not isinstance(value, str):
        return value
    name = _PRECISION_NAMES.get(value, value)
    if name not in PRECISION_PRESETS:
        raise ValueError(
            f"{value!r} is not a preset; choose float32, bf16, fp16 or fp8, or give a mapping (O0,"
            " O1, O2 and pure_fp16 are accepted too)"
        )
    return PRECISION_PRESETS[name]


RuleName = Literal["adamw", "adam", "sgd"]
"""Names of the rules. mypy finds the code of each place that has no case for a new one."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Facts about a rule, for planning, checkpoints and checks."""

    parts: tuple[str, ...]
    """Float32 tensors of a parameter's shape that it keeps, by torch's names."""
    takes_momentum: bool = False
    """Whether optimizer.momentum acts. Without one, the rule keeps nothing."""
    decouples_decay: bool = False
    """Whether decay is taken from the weight, and is not added to the gradient."""
    counts_updates: bool = False
    """Whether it keeps the number of updates, as float32 for each parameter."""

    def kept(self, momentum: float) -> tuple[str, ...]:
        """Return the parts that it keeps with this value of optimizer.momentum."""
        return self.parts if momentum or not self.takes_momentum else ()


_ADAM = ("exp_avg", "exp_avg_sq")
RULES: dict[RuleName, UpdateRule] = {
    "adamw": UpdateRule(parts=_ADAM, counts_updates=True, decouples_decay=True),
    "adam": UpdateRule(parts=_ADAM, counts_updates=True),
    "sgd": UpdateRule(parts=("momentum_buffer",), takes_momentum=True),
}
STATE_PARTS = tuple(dict.fromkeys(part for rule in RULES.values() for part in rule.parts))


def takes_momentum(name: object) -> bool:
    """Tell whether a name, which may be unknown, is of a rule on which optimizer.momentum acts."""
    return any(rule.takes_momentum for known, rule in RULES.items() if known == name)


def rule_keeping(parts: Collection[str]) -> RuleName:
    """Return the first rule that keeps these parts. It is adamw where none does."""
    return next((name for name, rule in RULES.items() if set(rule.parts) == set(parts)), "adamw")
