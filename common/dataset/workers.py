"""Map blocks to encoded blocks in order, in this process or in new processes.

The number of blocks in progress is bounded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.dataset.blocks import Block
from common.dataset.encode import EncodedBlock, EncodingRules, encode_block
from common.errors import RunError
from common.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Arguments of ``load_tokenizer``, so that every worker can load its own."""

    kind: str | None
    vocab_file: Path
    merge_file: Path | None
    backend: str

    def load(self) -> Tokenizer:
        return load_tokenizer(self.kind, self.vocab_file, self.merge_file, self.backend)


def limit_tokenizer_threads() -> None:
    """Let the tokenizer libraries use one thread in this process.

    Call it before the first of them is imported: they read these variables when their thread pool
    starts. Otherwise one worker would take every core.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encode_blocks(
    blocks: Iterable[Block], tokenizer: Tokenizer, choice: TokenizerChoice, rules: EncodingRules, workers: int
) -> Generator[list[EncodedBlock], None, None]:
    """Yield the encoded blocks in the order of ``blocks``. At most ``2 * workers`` are in memory.

    Raises the error of a worker, or RunError if a worker died.
    """
    if workers == 1:
        return (encode_block(block, tokenizer, rules) for block in blocks)
    return _encode_in_processes(blocks, choice, rules, workers)


def _encode_in_processes(
    blocks: Iterable[Block], choice: TokenizerChoice, rules: EncodingRules, workers: int
) -> Generator[list[EncodedBlock], None, None]:
    # Imported here: a run of one worker starts faster without them.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(
        workers,
        # fork would copy the locks of threads of any library that the caller has loaded
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(choice, rules),
    )
    waiting: deque[Future[list[EncodedBlock]]] = deque()
    try:
        for block in blocks:
            # workers inherit the mask: Ctrl-C reaches the whole group, and the parent ends them
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting.append(pool.submit(_encode_in_worker, block))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(f"a preprocessing worker died ({error}); was it out of memory? try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, EncodingRules] | None = None


def _start_worker(choice: TokenizerChoice, rules: EncodingRules) -> None:
    global _worker
    threading.Thread(target=_die_with_parent, daemon=True).start()
    limit_tokenizer_threads()
    _worker = choice.load(), rules


def _die_with_parent() -> None:
    """End this worker when its parent has died.

    A parent that is killed cannot end its pool, and the pool's pipes do not report it.
    """
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block) -> list[EncodedBlock]:
    assert _worker is not None
    tokenizer, rules = _worker
    return encode_block(block, tokenizer, rules)
