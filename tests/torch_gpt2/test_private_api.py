"""The private interfaces that torch_gpt2 uses exist in the installed versions, and the list equals the use."""

import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from types import ModuleType

import pytest

from torch_gpt2 import private_api as of_kernels
from torch_gpt2.deepspeed import private_api as of_deepspeed
from torch_gpt2.parallel import private_api as of_pipelining

LISTED = [(module, name) for module in (of_kernels, of_pipelining, of_deepspeed) for name in module.PRIVATE]


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_a_private_interface_is_there_and_used(module: ModuleType, name: str) -> None:
    source = inspect.getsource(module)
    holder, _, attribute = name.rpartition(".")
    assert attribute in source[source.index("}\n") :], f"{module.__name__} lists it, and nothing uses it"
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    version = importlib.import_module(package).__version__
    try:
        getattr(pkgutil.resolve_name(holder), attribute)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{package} {version} has no {name} ({error}); see private_api.py for its use and what is public")
