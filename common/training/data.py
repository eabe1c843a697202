"""Training batches and validation windows of a run, and their identity."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint.snapshot import TrainState
from common.config.schema import TokenizerConfig
from common.config.values import parse_split
from common.dataset.blend import Samples, open_samples, parse_blend, part_names, windows_by_part
from common.dataset.metadata import Metadata, read_metadata, vocabulary_remarks
from common.dataset.mindrecord import metadata_paths
from common.dataset.sampler import Batch, Tokens, ordered_batches, prefetch, rank_batches
from common.dataset.samples import EmptySplitError, Split
from common.errors import ConfigError, DataError, TokenizerError
from common.log import LOG, listed
from common.parallel.run import Run, wanted_keys
from common.paths import looked_in
from common.resolve.derive import fitting_vocabulary, require_length
from common.tokenizer import Tokenizer, load_tokenizer
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from common.weights.names import count_parameters

_WINDOWS_LOOKED_AT = 64
Passes = Mapping[str, Callable[[], Iterator[Tokens]]]
"""Functions that start a pass over a rank's share of windows, by the name of the data set. A blend has several."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    samples: Samples | None
    """None when only the validation part was asked for."""
    batches: Callable[[TrainState], Iterator[Batch]]
    """Function that returns batches from a state on, read when needed."""
    validation: Passes
    """Validation windows of the rank; empty without any."""
    validation_bytes: Callable[[], Mapping[str, int]]
    """Function that returns ``count_text_bytes`` of the windows of all ranks; empty on other
    data-parallel ranks than the first, which do not report.
    """
    no_validation: str | None
    """Reason why there are no validation windows."""
    tokenizer_record: dict[str, Any] | None
    """Kind, sha256 and vocabulary size of the tokenizer that made the data, if known."""
    prefetch: int = 0
    remarks: tuple[str, ...] = ()
    """Warnings about vocabularies that do not fit each other."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data, its split, the window and the seed."""
        return self.samples.fingerprint if self.samples else ""

    @property
    def samples_per_epoch(self) -> int:
        return self.samples.samples_per_epoch if self.samples else 0

    def training_batches(
        self, state: TrainState, prepare: Callable[[Batch], Batch] = lambda batch: batch
    ) -> AbstractContextManager[Iterator[Batch]]:
        """Return batches from ``state`` on, read ahead and prepared by a thread that ends with the context."""
        prepared = map(prepare, self.batches(state))
        return prefetch(prepared, self.prefetch) if self.prefetch else nullcontext(prepared)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data of a run as they are opened: what they say of the run, and the training samples."""

    records: list[tuple[Path, Metadata]]
    """The .meta.json files beside the data, with the prefix of each."""
    tokenizer_record: dict[str, Any] | None
    remarks: tuple[str, ...]
    vocabulary: dict[str, int]
    """Keys of the section model that follow from the tokenizer."""
    eod_id: int | None
    samples: Samples | None
    """None when only the validation part was asked for."""


def open_corpus(config: Run, *, training: bool = True) -> Corpus:
    """Open the data of a run whose vocabulary and length may still be open.

    Raises DataError and ConfigError.
    """
    # a blend may have thousands of files, and a mapped one is open
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    records = [
        (Path(prefix), metadata)
        for entries in (config.data.train, config.data.validation)
        for _, prefix in (parse_blend(require_entries(entries)) if entries else ())
        for path in metadata_paths(prefix)
        if (metadata := read_metadata(path)) is not None
    ]
    by_digest = {metadata.tokenizer_sha256: (prefix, metadata) for prefix, metadata in records}
    if len(by_digest) > 1:
        names = " and ".join(str(prefix) for prefix, _ in by_digest.values())
        raise DataError(f"{names} were made with different tokenizers; preprocess them with one")
    made_with: dict[str, Any] | None = None
    for sha256, (_, metadata) in by_digest.items():
        made_with = {"kind": metadata.tokenizer, "sha256": sha256, "vocab_size": metadata.vocab_size}
    given, remarks = (
        _given_tokenizer(config, is_known=made_with is not None) if training or made_with is None else (None, [])
    )
    record, model = made_with or given, config.model
    name = "the tokenizer of the data" if made_with is not None else "data.tokenizer"
    vocabulary = fitting_vocabulary(model, record["vocab_size"], name) if record else {}
    size = vocabulary.get("vocab_size", model.vocab_size)
    parameters = count_parameters(model) - (model.vocab_size - size) * model.hidden_size
    share = model.hidden_size / parameters
    remarks += vocabulary_remarks(made_with, given, size, share_of_row=share)
    eod = _find_eod(config, records, size)
    samples = None
    if training:
        require_length(config)
        data = config.data
        samples = _open(config, data.train, "train", shuffle=data.shuffle, stride=data.stride)
    return Corpus(
        records=records, tokenizer_record=record, remarks=tuple(remarks), vocabulary=vocabulary,
        eod_id=eod, samples=samples,
    )  # fmt: skip


def open_data(
    config: Run, corpus: Corpus, *, rank: int = 0, ranks: int | None = None, whole_validation: bool = False
) -> TrainingData:
    """Open the share of a rank.

    rank: data-parallel rank. ranks: number that divide each batch, all data-parallel ones when left
    out. They divide validation windows too, but not with ``whole_validation``. Raises DataError.
    """
    remarks, samples = [*corpus.remarks], corpus.samples
    if samples is not None:
        remarks += _eod_remarks(config, samples, corpus.records)

    def batches(state: TrainState) -> Iterator[Batch]:
        assert samples is not None
        return rank_batches(
            samples,
            state.consumed_samples,
            state.sample_hash,
            global_batch_size=config.train.global_batch_size,
            data_parallel_size=ranks or config.parallel.data_parallel,
            data_parallel_rank=rank,
            batch_size_at=config.batch_sizes.at,
            vocab_size=config.model.vocab_size,
        )

    validation: Passes = {}
    reason = None
    if samples is not None and config.validation.interval == "never":
        reason = "validation.interval is never"
    elif config.data.validation is None and not parse_split(config.data.split)[1]:
        reason = f"data.split is {config.data.split}"
    else:
        validation, without = _validation(config)
        if not validation:
            reason = next(iter(without.values()))
        elif without:
            remarks.append(f"no validation of {listed(list(without))}: {next(iter(without.values()))}")
    if samples is None and LOG.isEnabledFor(logging.INFO):  # a training reports them
        for remark in remarks:
            LOG.warning(remark)
    place = {"rank": rank, "ranks": ranks or config.parallel.data_parallel}
    return TrainingData(
        samples=samples,
        batches=batches,
        validation=validation
        if whole_validation
        else {name: partial(windows, **place) for name, windows in validation.items()},
        validation_bytes=dict
        if rank
        else cache(partial(count_text_bytes, validation, config, corpus.tokenizer_record)),
        no_validation=reason,
        tokenizer_record=corpus.tokenizer_record,
        prefetch=config.data.prefetch,
        remarks=tuple(remarks),
    )


def count_text_bytes(windows: Passes, config: Run, made_with: dict[str, Any] | None) -> dict[str, int]:
    """Return the bytes of the text of the tokens that windows predict, by data set.

    An end-of-text token has none. Empty unless data.tokenizer is the byte-level BPE that made the
    data: only its tokens have a number of bytes that does not depend on their neighbours.
    made_with: the data's record of their tokenizer; data without one are those of data.tokenizer.
    """
    try:
        tokenizer = load_given_tokenizer(config)[0]
    except (ConfigError, TokenizerError):  # training does not need it
        return {}
    size = tokenizer.vocab_size
    known = made_with is None or made_with["sha256"] == tokenizer.sha256
    if not isinstance(tokenizer, GPT2BPETokenizer) or not known:
        return {}
    lengths = np.array([len(tokenizer.decode_bytes([number])) for number in range(size)])
    lengths[tokenizer.eod_id] = 0
    counts = {name: np.zeros(size, np.int64) for name in windows}
    packing = config.packing
    for name, batches in windows.items():
        for tokens in batches():
            targets = tokens[:, 1:]
            if packing is not None and packing.masks_loss:
                targets = targets[~packing.uncounted(tokens)]
            if targets.max(initial=0) >= size:
                return {}
            counts[name] += np.bincount(targets.ravel(), minlength=size)
    return {name: int(count @ lengths) for name, count in counts.items()}


def _validation(config: Run) -> tuple[Passes, dict[str, str]]:
    """Return the validation windows of each data set, and why others have none.

    Every window is read once, so weights of a blend do not matter.
    """
    whole = config.data.validation is not None
    parts: dict[str, Samples] = {}
    without: dict[str, str] = {}
    for name, prefix in named_parts(config.data.validation if whole else config.data.train).items():
        try:  # without data.stride each token is scored once
            parts[name] = _open(config, [prefix], "train" if whole else "valid")
        except EmptySplitError as error:
            if whole:
                raise
            without[name] = str(error)
    windows = [part.samples_per_epoch for part in parts.values()]
    limits = windows_by_part(windows, config.validation.max_samples or sum(windows))
    passes = {
        name: partial(
            ordered_batches, part, config.validation.micro_batch_size, limit, vocab_size=config.model.vocab_size
        )
        for (name, part), limit in zip(parts.items(), limits, strict=True)
        if limit
    }
    return passes, without


def _open(
    config: Run, given: Sequence[str | float] | None, split: Split, *, shuffle: bool = False, stride: int | None = None
) -> Samples:
    return open_samples(
        require_entries(given),
        split=split,
        split_weights=(1.0, 0.0, 0.0) if config.data.validation is not None else parse_split(config.data.split),
        seq_length=config.model.seq_length,
        seed=config.seed,
        stride=stride,
        shuffle=shuffle,
        padded=config.data.eod_mask_loss == "targets",
    )


def named_parts(entries: Sequence[str | float] | None) -> dict[str, str]:
    """Return the prefixes of data.train or data.validation by a short name of each."""
    prefixes = [prefix for _, prefix in parse_blend(require_entries(entries))]
    return dict(zip(part_names(prefixes), prefixes, strict=True))


def require_entries(entries: Sequence[str | float] | None) -> list[str]:
    """Return the entries of data.train. Raises ConfigError if there are none."""
    if not entries:
        raise ConfigError(
            "data.train is not given; set it to the prefix of a .bin/.idx pair or to a MindRecord,"
            " as tools/preprocess_data.py writes them"
        )
    return list(map(str, entries))


def _find_eod(config: Run, records: list[tuple[Path, Metadata]], vocab_size: int) -> int | None:
    """Return data.eod_id, found out if a key needs it. Raises ConfigError."""
    wanted, eod = wanted_keys(config.data), config.data.eod_id
    if not wanted:
        return eod
    named = f"{' and '.join(wanted)}: "
    if eod is None:
        for prefix, metadata in records:
            if metadata.eod_id is None:
                raise ConfigError(
                    f"{named}the documents of {prefix} do not end with a token of their own, since they were made with"
                    " --no-append-eod; preprocess them without it, or set data.eod_id to a token that ends them"
                )
        try:
            eod = records[0][1].eod_id if records else load_given_tokenizer(config)[0].eod_id
        except (ConfigError, TokenizerError) as error:
            raise ConfigError(
                f"{named}the id of the token that ends a document is not known: the data have no .meta.json, and there"
                f" is no tokenizer to ask ({error}); set data.tokenizer or data.eod_id"
            ) from None
    assert eod is not None
    if eod >= vocab_size:
        raise ConfigError(
            f"{named}data.eod_id={eod} is not a token of the vocabulary, which has"
            f" {vocab_size}; give the id that ends documents in the data"
        )
    return eod


def _eod_remarks(config: Run, samples: Samples, records: list[tuple[Path, Metadata]]) -> list[str]:
    """Return a warning if the data end documents with another token than the one in use, or if
    their first windows do not hold it.
    """
    if config.packing is None:
        return []
    pads = config.packing.masks_loss == "targets" and not config.packing.separates
    for prefix, metadata in records:
        if metadata.eod_id not in (None, config.packing.eod):
            return [
                f"data.eod_id={config.packing.eod}, but the documents of {prefix} end with"
                f" {metadata.eod_id}; leave the key out, unless other parts of a document are meant"
            ]
    tokens = samples.read(np.arange(min(_WINDOWS_LOOKED_AT, samples.samples_per_epoch)))
    if pads or (tokens == config.packing.eod).any():
        return []
    return [
        f"{' and '.join(wanted_keys(config.data))}: the first {len(tokens)} windows do not hold"
        f" the token {config.packing.eod} that ends documents, so each counts as one document; if"
        " the documents are shorter, preprocess them without --no-append-eod, or set data.eod_id"
    ]


def open_tokenizer(config: Run) -> tuple[Tokenizer, dict[str, int]]:
    """Load data.tokenizer, with warnings for mismatches. Returns the keys of model that follow."""
    tokenizer, source = load_given_tokenizer(config)
    vocabulary = fitting_vocabulary(config.model, tokenizer.vocab_size, f"the tokenizer in {source}")
    size = vocabulary.get("vocab_size", config.model.vocab_size)
    for remark in vocabulary_remarks(None, describe_tokenizer(tokenizer), size):
        LOG.warning(remark)
    return tokenizer, vocabulary


def load_given_tokenizer(config: Run) -> tuple[Tokenizer, str]:
    """Return the tokenizer and its path."""
    wish, source = tokenizer_source(config)
    model = config.checkpoint.load
    return load_tokenizer(wish.type, source, wish.merge_file, wish.backend, model), source


def tokenizer_source(config: Run) -> tuple[TokenizerConfig, str]:
    """Return data.tokenizer and its vocabulary or folder. Raises ConfigError if there is none."""
    wish = config.data.tokenizer
    source = wish.vocab_file or wish.folder if wish is not None else None
    if wish is None or source is None:
        raise ConfigError(
            "data.tokenizer is not given; set it to the folder of vocab.json and merges.txt, or of"
            " vocab.txt, a SentencePiece .model or tokenizer.json"
        )
    return wish, source


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"kind": tokenizer.kind, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}


def _given_tokenizer(config: Run, *, is_known: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the record of data.tokenizer, and warnings. Training can run without its files.

    is_known: whether the data name their tokenizer. Raises TokenizerError if the files of a
    required tokenizer are broken.
    """
    wish = config.data.tokenizer
    if wish is None:
        return None, []
    source = Path(wish.vocab_file or wish.folder or "")
    if not source.exists():
        without = (
            "training does not need it, but predict does"
            if is_known
            else "the data does not record its vocabulary, so it cannot be checked"
        )
        return None, [f"data.tokenizer: {source} is not there{looked_in(source)}, and {without}"]
    try:
        return describe_tokenizer(load_given_tokenizer(config)[0]), []
    except TokenizerError as error:
        if not is_known:
            raise
        return None, [f"data.tokenizer cannot be used, which predict needs, but not training: {error}"]
