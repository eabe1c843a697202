"""The choice and order of tests, and data that many share."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from common.log import LOG
from tests.cluster_tables import write_samples
from tests.run_scripts import OF_LAUNCHERS

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked long: the whole suite")


def pytest_configure() -> None:
    """Forget what launchers, clusters and a user's shell have set: tests are not ranks of a job, and ask no hub but
    one of their own. A shell that started them in the background lets children ignore SIGHUP.

    ASCEND: where the driver's libraries lie.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    kept = ("ASCEND", "OMP_NUM_THREADS", "GPT2_PEERS", "GPT2_TEST_DATA", "GPT2_FAULT", "GPT2_LOAD")
    for name in list(os.environ):
        if OF_LAUNCHERS.search(name) and not name.startswith(kept):
            del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests to the whole suite. The commands of the pages take minutes, so they start
    first, then the other modules with long tests; short ones fill the end of every worker.
    """

    def is_left_out(item: pytest.Item) -> bool:
        if config.getoption("--all"):
            return item.get_closest_marker("representative") is not None
        is_campaign = item.get_closest_marker("campaign") is not None
        return item.get_closest_marker("long") is not None and not is_campaign

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
    slow = {item.path for item in items if item.get_closest_marker("long")}
    quick = {"common", "tools"}  # folders whose other modules take a second each
    items.sort(
        key=lambda item: (
            item.path.name != "test_pages.py",
            item.path not in slow,
            not quick.isdisjoint(item.path.parts),
        )
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a module on one worker, except those of the pages: each takes a minute."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_page = "::test_the_commands_of_a_page" in nodeid
            return nodeid if is_page else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Undo what a run of MindSpore in the process of the tests leaves.

    It turns SIGINT into SIGTERM, takes it in a thread of its own, and blocks it elsewhere, which children inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Undo the log that a program started in the process of the tests: its output is closed after the test."""
    yield
    LOG.handlers.clear()
    LOG.propagate = True
    LOG.setLevel(logging.NOTSET)


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
    reason = "MindSpore is not installed: pip install '.[mindspore]'"
    module = pytest.importorskip("mindspore", reason=reason)
    from mindformers_gpt2.device import select_device

    select_device("cpu")
    return module


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json, merges.txt and corpus.txt, fetched once for all processes of the tests; skips the
    test where they cannot be had.
    """
    temporary = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        temporary = temporary.parent
    folder = temporary / "quickstart_data"
    fetch = [sys.executable, str(ROOT / "tools" / "fetch_quickstart_data.py"), "--output"]
    with (temporary / "quickstart_data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([*fetch, str(folder)], capture_output=True, text=True)
    if done.returncode and "cannot be downloaded" in done.stderr:
        pytest.skip("the GPT-2 vocabulary cannot be downloaded")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def gpt2_vocab_files(quickstart_data: Path) -> tuple[Path, Path]:
    """OpenAI's vocabulary and merges."""
    return quickstart_data / "vocab.json", quickstart_data / "merges.txt"


@pytest.fixture(scope="session")
def english(quickstart_data: Path) -> str:
    """Shakespeare's plays; CPython's manual where these cannot be had."""
    return (quickstart_data / "corpus.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def chinese() -> list[str]:
    """The starts of seven chapters of a novel, 红楼梦 (public domain)."""
    return json.loads((ROOT / "tests" / "chinese_novel.json").read_text(encoding="utf-8"))


@pytest.fixture
def break_package(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that puts a package that cannot be loaded, such as one for a newer system, in the place of one."""

    def run(name: str) -> None:
        folder = tmp_path_factory.mktemp("broken")
        (folder / f"{name}.py").write_text("raise ImportError('GLIBC_2.38 not found')")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return run


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rank tables and files hccn.conf of each form."""
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    return folder


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder of large corpora and other systems' vocabularies, GPT2_TEST_DATA: for campaigns."""
    return Path(os.environ.get("GPT2_TEST_DATA") or pytest.skip("GPT2_TEST_DATA is not set"))


@pytest.fixture(scope="session")
def corpus_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .bin/.idx pair of 60 documents with 300 to 800 random tokens below 101, without a
    .meta.json. Beside it is the pair ``other`` of 20 documents with 800, for blends.
    """
    from common.dataset.indexed import IndexedWriter

    prefix = tmp_path_factory.mktemp("corpus") / "random_text_document"
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in generator.integers(300, 800, size=60):
            # most tokens repeat the one before, so that there is something to learn
            tokens = generator.integers(0, 101, size=length)
            fresh = generator.random(length) < 0.2
            writer.append(tokens[np.maximum.accumulate(np.where(fresh, np.arange(length), 0))], np.array([length]))
    with IndexedWriter(prefix.with_name("other"), np.uint16) as writer:
        writer.append(np.repeat(generator.integers(0, 101, size=8000), 2), np.full(20, 800))
    return prefix


@pytest.fixture(scope="session")
def npu_variables() -> dict[str, str]:
    """Environment variables of a child process in which device=npu is the simulated one."""
    from tests.simulated_npu.build import npu_variables

    return _or_skip(npu_variables)


@pytest.fixture(scope="session")
def cuda_variables() -> dict[str, str]:
    """Environment variables of a child process with the CUDA device of tests/fake_cuda."""
    from tests.fake_cuda.build import cuda_variables

    return _or_skip(cuda_variables)


def _or_skip(variables: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Skip a test whose device cannot be built."""
    from tests.native_library import CannotBuild

    try:
        return variables()
    except CannotBuild as reason:
        pytest.skip(f"no device to take its place: {reason}")
