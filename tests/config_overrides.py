"""Variations of a configuration, written section__key=value."""

from pathlib import Path
from typing import Any

import yaml

GPT2_124M = tuple(
    f"model.{key}"
    for key in ("num_layers=12", "hidden_size=768", "num_heads=12", "seq_length=1024",
                "vocab_size=50257")
)  # fmt: skip


def sizes_of(preset: str) -> tuple[str, ...]:
    """Overrides in place of the checkpoint that a preset takes its sizes from."""
    return GPT2_124M if preset.endswith("_finetune") else ()


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with ``changes`` put in: ``train__max_steps=3`` sets one key, ``train={...}``
    replaces the section.
    """
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    return tree


def small_tree(**changes: Any) -> dict[str, Any]:
    """Ten steps on four layers of width 32."""
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 16, "seq_length": 8}
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": sizes | {"vocab_size": 100},
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    return changed(tree, changes)


def with_words(tree: dict[str, Any], words: str) -> dict[str, Any]:
    """``tree`` with words ``section.key=value`` put in, whose values are YAML."""
    for word in words.split():
        dotted, _, value = word.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(value)
    return tree


def blended(corpus: Path) -> list[str | float]:
    """data.train of a blend of the session's corpus and the one beside it."""
    return [0.7, str(corpus), 0.3, str(corpus.with_name("other"))]
