"""Folder of the sample rank tables."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def samples(shared_data: Path) -> Path:
    folder = shared_data / "ranktables"
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is absent; set GPT2_TEST_DATA")
    return folder
