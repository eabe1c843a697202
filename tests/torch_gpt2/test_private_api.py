"""The private interfaces that torch_gpt2 uses exist in the installed versions, under the names and
signatures it knows.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from importlib.util import find_spec

import pytest

from torch_gpt2 import private_api as of_kernels
from torch_gpt2.deepspeed import private_api as of_deepspeed
from torch_gpt2.parallel import private_api as of_pipelining

NAMES = [*of_kernels.PRIVATE, *of_pipelining.PRIVATE, *of_deepspeed.PRIVATE]


@pytest.mark.parametrize("name", NAMES)
def test_a_private_interface_is_there(name: str) -> None:
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    version = importlib.import_module(package).__version__
    holder, _, attribute = name.rpartition(".")
    try:
        getattr(pkgutil.resolve_name(holder), attribute)
    except (AttributeError, ImportError) as error:
        pytest.fail(
            f"{package} {version} has no {name} ({error}); the file private_api.py says what it was"
            " used for, and what is public"
        )


def test_the_list_equals_the_use() -> None:
    for module in (of_kernels, of_pipelining, of_deepspeed):
        source = inspect.getsource(module)
        listing = source.index("}\n")
        for name in module.PRIVATE:
            assert name.rpartition(".")[2] in source[listing:], (
                f"{name} is listed in {module.__name__}, and nothing uses it"
            )
