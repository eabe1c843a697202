"""Import it first: it skips a module of tests where MindSpore is not installed."""

import os

import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
