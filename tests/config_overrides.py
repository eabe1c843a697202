"""Variations of a configuration, written section__key=value."""

from pathlib import Path
from typing import Any


def sizes_of(preset: str) -> tuple[str, ...]:
    """Overrides in place of the checkpoint that a preset takes its sizes from."""
    sizes = ("num_layers=12", "hidden_size=768", "num_heads=12", "seq_length=1024", "vocab_size=50257")
    return tuple(f"model.{size}" for size in sizes) if preset.endswith("_finetune") else ()


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with ``changes`` put in: ``train__max_steps=3`` sets one key, ``train={...}`` replaces the section."""
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    return tree


def blended(corpus: Path) -> list[str | float]:
    """data.train of a blend of the session's corpus and the one beside it."""
    return [0.7, str(corpus), 0.3, str(corpus.with_name("other"))]
