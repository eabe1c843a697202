"""train.micro_batch_size=auto on MindSpore, where the plan decides."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

from tests.torch_gpt2.test_auto_fit import require_two_ranks_equal_one

pytestmark = pytest.mark.campaign


def test_two_ranks_take_the_same_one(corpus_prefix: Path, tmp_path: Path) -> None:
    require_two_ranks_equal_one(tmp_path, corpus_prefix, "mindspore", 1e-5)
