"""Choice of the steps to trace, and of the trace's file. A backend's ``train.py`` traces them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from common.checkpoint.snapshot import TrainState
from common.errors import ConfigError
from common.files import atomic_write
from common.log import LOG
from common.parallel.run import Run

Trace = Callable[[Path], AbstractContextManager[None]]
"""Function that traces the steps within its context and writes the trace to a file."""


class ProfileWindow:
    """Trace that begins before step profile.start and ends after profile.stop or with the run.

    The loop calls ``begin`` before and ``end`` after the steps that it requests from an engine, and
    stops at ``boundaries``.
    """

    def __init__(self, config: Run, state: TrainState, trace: Trace, *, rank: int = 0) -> None:
        """Create a window. Raises ConfigError if it lies beyond the run's end."""
        self._trace = trace
        self._open = ExitStack()
        self._rank = rank
        self._folder = Path(config.output_dir) / "profile"
        self._steps = range(0)
        start, last = config.profile.start, config.train.steps
        if start is None:
            return
        if start > last:
            raise ConfigError(
                f"profile.start={start} is beyond the last step, {last}: nothing would be traced; lower it"
            )
        stop = min(config.profile.stop or start, last)
        self._steps = range(max(start, state.step + 1), stop + 1)
        if not self._steps:
            LOG.warning(f"profile: steps {start} to {stop} are done already; nothing is traced")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return the steps after which a trace begins or ends."""
        return (self._steps[0] - 1, self._steps[-1]) if self._steps else ()

    def begin(self, step: int) -> None:
        """Start the trace if ``step``, the next one, is the first of the window."""
        if self._steps and step == self._steps[0]:
            path = self._folder / f"steps_{step}_{self._steps[-1]}_rank_{self._rank}.json.gz"
            LOG.info(
                f"profile: steps {step} to {self._steps[-1]} are traced, which slows them down; the"
                f" trace goes to {path}"
            )
            with _warning_only():
                self._open.enter_context(self._trace(path))

    def end(self, step: int) -> None:
        """End the trace if ``step``, just done, is the last of the window."""
        if self._steps and step == self._steps[-1]:
            with _warning_only():
                self._open.close()

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(self, *_: object) -> None:
        with _warning_only():
            self._open.close()


@contextmanager
def _warning_only() -> Iterator[None]:
    """Turn any error of the trace into a warning.

    A full disk or a driver without a profiler must not end the training.
    """
    try:
        yield
    except Exception as error:
        LOG.warning(f"profile: no trace: {error}")


def compress(trace: Path, path: Path) -> None:
    """Move a trace to ``path`` as gzip, which Perfetto, TensorBoard and chrome://tracing open.
    Raises StorageError.
    """
    with (
        trace.open("rb") as plain,
        atomic_write(path) as file,
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    trace.unlink()
