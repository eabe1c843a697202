"""Shards of a corpus as tasks of Ray, joined to the bytes that one process writes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.dataset.merge import merge_datasets
from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.preprocess import PreprocessOptions, PreprocessResult, Progress, preprocess
from common.dataset.shards import MOST, Shard
from common.dataset.token_files import with_extension
from common.errors import ConfigError, GPT2Error, RunError
from common.packages import require_package
from common.paths import ROOT

_TRIES_AGAIN = 3
"""Further attempts at a shard whose process died."""
_EXTENSIONS = (".bin", ".idx", METADATA_EXTENSION)


def preprocess_on_ray(
    options: PreprocessOptions,
    shards: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> PreprocessResult:
    """Write the pairs as ``preprocess`` does, by ``shards`` tasks and a merge.

    A shard whose process died is started again. After a failure the finished shards stay, and the
    same call keeps them; after success they are removed. ``on_progress`` is called after each one.
    Raises the error of a task, ConfigError without ray, and RunError where Ray fails or the shards
    cannot be seen from here.
    """
    if not 1 <= shards <= MOST:
        raise ConfigError(f"--shards {shards}: expected 1 to {MOST}")
    require_package("ray", extra="ray", purpose="which --engine ray needs")
    options.keep_inputs(
        with_extension(options.prefix_of(key), extension)
        for key in {*options.json_keys, "text"}
        for extension in _EXTENSIONS
    )
    started = time.monotonic()
    with _cluster() as (ray, deliver_signal):
        results = _run_all(ray, _absolute(options), shards, started, on_progress, deliver_signal)
    prefixes = []
    for number, key in enumerate(results[0].keys):
        parts = [result.prefixes[number] for result in results]
        unseen = next((part for part in parts if not with_extension(part, ".idx").exists()), None)
        if unseen is not None:
            raise RunError(
                f"{unseen}: was written on another host and is not here; give an --output-prefix"
                " and --input on storage that all hosts of the Ray cluster share"
            )
        prefixes.append(options.prefix_of(key))
        merge_datasets(parts, prefixes[-1])
    for result in results:
        for part in result.prefixes:
            for extension in reversed(_EXTENSIONS):
                with_extension(part, extension).unlink(missing_ok=True)
    return PreprocessResult(
        prefixes=tuple(prefixes), keys=results[0].keys, progress=_sum(results, shards, started)
    )


def _run_all(
    ray: Any,
    options: PreprocessOptions,
    shards: int,
    started: float,
    on_progress: Callable[[Progress], None],
    deliver_signal: Callable[[], None],
) -> list[PreprocessResult]:
    """Return the results of all tasks in the order of the shards."""
    if ray.cluster_resources().get("CPU", 0) < 1:
        raise RunError(
            "the Ray cluster has no CPU for a task; start nodes with ray start --num-cpus N"
        )
    task = ray.remote(num_cpus=1, max_retries=_TRIES_AGAIN)(preprocess)
    numbers = {}
    for number in range(1, shards + 1):
        shard = Shard(number=number, count=shards)
        named = task.options(name=f"shard {shard}")
        numbers[named.remote(replace(options, shard=shard))] = number
    done: dict[int, PreprocessResult] = {}
    waiting = list(numbers)
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=0.5)
            deliver_signal()
            for reference in ready:
                done[numbers[reference]] = _result(ray, reference, f"{numbers[reference]}/{shards}")
                on_progress(_sum(list(done.values()), shards, started))
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
    return [done[number] for number in sorted(done)]


def _result(ray: Any, reference: Any, shard: str) -> PreprocessResult:
    """Return the result of a finished task. Raises its error, without Ray's frame around it."""
    try:
        result: PreprocessResult = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GPT2Error):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"shard {shard} failed in {_TRIES_AGAIN + 1} attempts: {reason}; was it out of memory?"
            " give more --shards, or nodes with more memory; the same command continues"
        ) from None
    return result


@contextmanager
def _cluster() -> Iterator[tuple[Any, Callable[[], None]]]:
    """Connect to the cluster of $RAY_ADDRESS or of this host, or start one on this host.

    Yields Ray, and a function that calls the handler of a SIGTERM that has come. Raised inside Ray,
    the handler's exception would turn into one of Ray's own.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to Ray's makers
    import ray

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # libraries of tokenizers read the second and third variable when they are imported
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            runtime_env={"env_vars": variables},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"Ray cannot be reached or started: {reason}; check RAY_ADDRESS and ray status, or"
            " leave --engine ray out"
        ) from None
    received: list[int] = []

    def deliver_signal() -> None:
        if received and callable(handler):
            handler(received.pop(), None)

    try:
        # Ray's own handler ends with another exit code
        later = (lambda number, frame: received.append(number)) if callable(handler) else handler
        signal.signal(signal.SIGTERM, later)
        yield ray, deliver_signal
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
    deliver_signal()


def _absolute(options: PreprocessOptions) -> PreprocessOptions:
    """Return the options with paths that mean the same in another working folder."""
    tokenizer = options.tokenizer
    merges = tokenizer.merge_file
    return replace(
        options,
        inputs=tuple(map(_path, options.inputs)),
        output_prefix=_path(options.output_prefix),
        tokenizer=replace(
            tokenizer,
            vocab_file=_path(tokenizer.vocab_file),
            merge_file=None if merges is None else _path(merges),
        ),
    )


def _path(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _sum(results: list[PreprocessResult], shards: int, started: float) -> Progress:
    found = [result.progress for result in results]
    total = max(each.total_bytes for each in found)
    return Progress(
        documents=sum(each.documents for each in found),
        empty=sum(each.empty for each in found),
        short=sum(each.short for each in found),
        short_bytes=sum(each.short_bytes for each in found),
        tokens=sum(each.tokens for each in found),
        text_bytes=sum(each.text_bytes for each in found),
        read_bytes=total * len(found) // shards,
        total_bytes=total,
        seconds=time.monotonic() - started,
    )
