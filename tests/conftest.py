"""Place of real data for the tests: the folder GPT2_TEST_DATA, or ../shared/data beside the
repository.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also run the tests marked long: the whole suite"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests to the whole suite. The commands of the pages take minutes, so they start
    first, then the other modules with long tests; short ones fill the end of every worker.
    """
    if not config.getoption("--all"):
        left_out = [
            item
            for item in items
            if item.get_closest_marker("long") and not item.get_closest_marker("campaign")
        ]
    else:
        left_out = [item for item in items if item.get_closest_marker("representative")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    slow = {item.path for item in items if item.get_closest_marker("long")}
    quick = ("common", "tools")  # folders whose other modules take a second each
    items.sort(
        key=lambda item: (
            item.path.name != "test_pages.py",
            item.path not in slow,
            not set(quick).isdisjoint(item.path.parts),
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a module on one worker, except those of the pages: each takes a minute."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return (
                nodeid
                if "::test_the_commands_of_a_page" in nodeid
                else super()._split_scope(nodeid)
            )

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _signals() -> None:
    """Children inherit ignored signals: a suite started in the background by a script (``&``,
    ``nohup``) would hand these on.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Undo what a run of MindSpore in the process of the tests leaves.

    It turns SIGINT into SIGTERM, takes it in a thread of its own, and blocks it elsewhere, which
    children inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much where other processes want the
    cores.
    """
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mindspore() -> ModuleType:
    """MindSpore with its device chosen: after the first operation of a process it can no longer
    be.
    """
    module = pytest.importorskip(
        "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
    )
    from mindformers_gpt2.device import select_device

    select_device("cpu")
    return module


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora, vocabularies and rank tables; skips the test when it is absent."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("GPT2_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is not a folder; set GPT2_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def gpt2_vocab_files(shared_data: Path) -> tuple[Path, Path]:
    """OpenAI's encoder.json and vocab.bpe."""
    files = (shared_data / "vocab" / "encoder.json", shared_data / "vocab" / "vocab.bpe")
    for file in files:
        if not file.is_file():
            pytest.skip(f"no test data: {file} is absent; set GPT2_TEST_DATA")
    return files


@pytest.fixture(scope="session")
def corpus_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .bin/.idx pair of 60 documents with 300 to 800 random tokens below 101, without a
    .meta.json. Beside it is the pair ``other`` of 20 documents with 800, for blends.
    """
    from common.dataset import IndexedWriter

    prefix = tmp_path_factory.mktemp("corpus") / "random_text_document"
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in generator.integers(300, 800, size=60):
            # most tokens repeat the one before, so that there is something to learn
            tokens = generator.integers(0, 101, size=length)
            fresh = generator.random(length) < 0.2
            writer.append(
                tokens[np.maximum.accumulate(np.where(fresh, np.arange(length), 0))],
                np.array([length]),
            )
    with IndexedWriter(prefix.with_name("other"), np.uint16) as writer:
        writer.append(np.repeat(generator.integers(0, 101, size=8000), 2), np.full(20, 800))
    return prefix


@pytest.fixture(scope="session")
def npu_variables() -> dict[str, str]:
    """Environment variables of a child process in which device=npu is the simulated one; skips the
    test where that cannot be built.
    """
    from tests.simulated_npu.build import CannotBuild, npu_variables

    try:
        return npu_variables()
    except CannotBuild as reason:
        pytest.skip(f"no simulated NPU: {reason}")
