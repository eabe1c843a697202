"""Every key that a user may give acts: some code reads it, and not only its schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.hints import schema_keys
from tests.key_reads import Source

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = ROOT / "common" / "config" / "schema.py"
FOLDERS = ("common", "torch_gpt2", "mindformers_gpt2", "gpt2_toolkit", "tools")
PLANTED = {
    "ModelConfig": ('activation: Literal["gelu_tanh", "relu"] = "gelu_tanh"', "model.activation"),
    "ParallelConfig": ("context_parallel: Count = 1", "parallel.context_parallel"),
    "TrainConfig": ("interval: Count = 1", "train.interval"),
    "ValidationConfig": ('name: Text = "x"', "validation.name"),
    "ProfileConfig": ("seed: Count = 1", "profile.seed"),
    "OptimizerConfig": ('state: Text = "x"', "optimizer.state"),
    "DataConfig": ("count: Count = 1", "data.count"),
    "LossScaleConfig": ("momentum: Count = 1", "loss_scale.momentum"),
}
"""Keys that no code reads, added to the schema before the search. Other sections have keys of some
of these names, and other objects such attributes.
"""


@pytest.fixture(scope="module")
def source() -> Source:
    text = SCHEMA.read_text(encoding="utf-8")
    for section, (line, key) in PLANTED.items():
        head = f"class {section}(Section):\n"
        assert head in text
        assert key not in schema_keys(), f"{key} is a key now: plant another one"
        text = text.replace(head, f"{head}    {line}\n")
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return Source(ROOT, [*files, ROOT / "run_gpt2.py"], {SCHEMA: text})


@pytest.mark.parametrize(
    ("root", "own", "why_not"),
    [
        (
            "common.config.schema.RunConfig",
            "common.config.",
            {
                "model.dropout": "resolved.py gives it to the three rates, which are read",
                **dict.fromkeys((key for _, key in PLANTED.values()), "planted"),
            },
        ),
        ("common.study.definition.Definition", "common.study.definition", {}),
        (
            "common.serving.protocol.CompletionRequest",
            "common.serving.protocol",
            {
                "best_of": "must equal n, which is read",
                "user": "names a client: accepted, unused",
                "stream_options.include_obfuscation": "accepted, unused",
            },
        ),
    ],
)
def test_every_key_is_read(source: Source, root: str, own: str, why_not: dict[str, str]) -> None:
    """why_not: keys that nothing reads by name, and the reason. A key that is only read from a dump
    or by a variable name belongs there too.
    """
    assert source.unread_keys(root, own) == why_not.keys(), (
        "read each key where it acts, from a config with an annotated type, or take it out"
    )
