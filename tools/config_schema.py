"""Print the JSON Schema of a run's YAML or of a study's, for completion and checks in editors.

    python tools/config_schema.py > configs/schema.json
    python tools/config_schema.py --study > configs/study/schema.json
    python tools/config_schema.py --reference > docs/config_reference.md

--reference prints a table of every key as Markdown. A single key in words:
python run_gpt2.py --explain optimizer.learning_rate. Exit code: 0, and 2 for an argument.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import json
import sys
from dataclasses import dataclass
from typing import Any

from common.config.aliases import ALIASES
from common.config.reference import config_reference
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.flags import flag
from common.program import command
from common.study.loading import definition_schema


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
            target = schema["$defs"][(node.get("$ref") or node["allOf"][0]["$ref"]).rpartition("/")[2]]
        choices: dict[str, Any] = {"enum": [*alias.values, None]} if alias.values else {"type": ["integer", "null"]}
        target["properties"][key] = {"description": alias.description, **choices}
    model = schema["properties"]["model"]
    model["anyOf"] = [{"const": "from_checkpoint"}, {"$ref": model.pop("$ref")}]
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)  # a file may leave to its base what the run needs
    return json.dumps(schema, indent=1) + "\n"


def study_schema() -> str:
    return json.dumps(definition_schema(), indent=1) + "\n"


@dataclass(kw_only=True)
class Request:
    reference: bool = flag("print the reference of keys instead of the schema")
    study: bool = flag("print the schema of a study's YAML instead")

    def __post_init__(self) -> None:
        if self.reference and self.study:
            raise ConfigError("argument --study: not allowed with argument --reference")


@command(Request)
def main(request: Request) -> None:
    write = config_reference if request.reference else study_schema if request.study else config_schema
    sys.stdout.write(write())
