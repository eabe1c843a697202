"""Packages of a wheel; everything else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

_PARTS = ("common*", "gpt2_study*", "torch_gpt2*", "mindformers_gpt2*", "gpt2_toolkit*")
# the programs of gpt2 are no top-level package, whose name others may have
setup(
    packages=[*find_namespace_packages(include=_PARTS), "gpt2_toolkit.tools"],
    package_dir={"gpt2_toolkit.tools": "tools"},
)
