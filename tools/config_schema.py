"""Print the JSON Schema of a run's YAML, for editors: python tools/config_schema.py > configs/schema.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)  # a file may leave to its base what the run needs
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(config_schema())
