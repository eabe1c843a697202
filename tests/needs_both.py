"""Import it first: it skips a module of tests where torch or MindSpore is not installed."""

import pytest

import tests.needs_mindspore  # noqa: F401

pytest.importorskip("torch", reason="torch is not installed")
