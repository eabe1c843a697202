"""Shipped configs: flattened into golden files, so that a changed default shows as one line of diff; and their sizes."""

import os
from pathlib import Path

import pytest

from common.config.load import flatten, load_config
from common.config.resolve import resolve_config
from common.weights.names import count_parameters
from tools.config_schema import config_schema

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted((ROOT / "configs" / "gpt2").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    resolved = resolve_config(load_config(path))
    text = "".join(f"{key} = {value!r}\n" for key, value in flatten(resolved.model_dump()))
    golden = GOLDEN / f"{path.stem}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "a default or preset changed; if that is wanted: make golden"


def test_json_schema_is_up_to_date() -> None:
    path = ROOT / "configs" / "schema.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(config_schema())
    assert path.read_text() == config_schema(), "python tools/config_schema.py > configs/schema.json"


@pytest.mark.parametrize(("name", "parameters"), [("run_gpt2", 124_439_808), ("run_gpt2_tiny", 11_453_760)])
def test_parameter_count_is_the_closed_form(name: str, parameters: int) -> None:
    model = resolve_config(load_config(ROOT / "configs" / "gpt2" / f"{name}.yaml")).model
    h, layers = model.hidden_size, model.num_layers
    assert count_parameters(model) == model.vocab_size * h + model.seq_length * h + layers * (12 * h * h + 13 * h) + 2 * h == parameters


def test_every_field_is_documented() -> None:
    from common.config.load import _schema_keys
    from common.config.schema import RunConfig

    def undocumented(model: type, prefix: str = "") -> list[str]:
        keys = dict(_schema_keys(RunConfig))
        return [
            f"{prefix}{name}" for name, field in model.model_fields.items() if not field.description and not keys.get(f"{prefix}{name}")
        ]

    missing = undocumented(RunConfig)
    for name, field in RunConfig.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            missing += undocumented(field.annotation, f"{name}.")
    assert missing == []
