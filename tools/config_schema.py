"""Print the JSON Schema of a run's YAML, which editors use for completion and checks:

    python tools/config_schema.py > configs/schema.json

A single key in words: python run_gpt2.py --explain optimizer.learning_rate. Exit code: 0, and 2 for
an argument.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

import argparse
import json
from typing import Any

from common.config.aliases import ALIASES
from common.config.schema import RunConfig


def config_schema() -> str:
    schema = RunConfig.model_json_schema()
    schema["properties"] = {
        "base": {
            "description": "Files that this one builds on, in order; its own values win.",
            "type": ["string", "array"],
            "items": {"type": "string"},
        },
        **schema["properties"],
    }
    for name, alias in ALIASES.items():
        *sections, key = name.split(".")
        target = schema
        for section in sections:
            node = target["properties"][section]
            target = schema["$defs"][
                (node.get("$ref") or node["allOf"][0]["$ref"]).rpartition("/")[2]
            ]
        choices: dict[str, Any] = (
            {"enum": [*alias.values, None]} if alias.values else {"type": ["integer", "null"]}
        )
        target["properties"][key] = {"description": alias.description, **choices}
    model = schema["properties"]["model"]
    model["anyOf"] = [{"const": "from_checkpoint"}, {"$ref": model.pop("$ref")}]
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)  # a file may leave to its base what the run needs
    return json.dumps(schema, indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    sys.stdout.write(config_schema())
    return 0


if __name__ == "__main__":
    run_script(main)
