"""The list of what is generated."""

from __future__ import annotations

import importlib

from tests.fuzz.engine import AREAS
from tests.fuzz.mutations import BYTES, FILES, NEARBY, SHAPES, UNREADABLE, VALUES, YAML_VALUES


def listing() -> str:
    lines = [
        f"bytes: {', '.join(BYTES)}",
        f"files: {', '.join(FILES)}",
        f"errors of the disk: {', '.join(UNREADABLE)}",
        f"values of JSON and YAML: {', '.join([*VALUES, NEARBY])}",
        f"values of YAML: {', '.join(YAML_VALUES)}",
        f"trees of JSON and YAML: {', '.join(SHAPES)}",
    ]
    for area in AREAS:
        lines.append(f"{area}:")
        lines += [
            f"  {name}: {what}"
            for name, what in importlib.import_module(f"tests.fuzz.{area}").CLASSES.items()
        ]
    return "\n".join(lines)
