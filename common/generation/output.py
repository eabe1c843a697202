"""Continuations on standard output, in a file of JSON lines or plain text, or in a folder.

A single continuation is printed token by token. A folder has a file for each text; a run that was
stopped resumes filling it.

{i}-{j}.txt          continuation j of prompt i, both from 0, as GPT2-Chinese's generate_texts.py
                     names them: the prompt and what follows it
generation.json      the weights, the settings and the prompts that the texts come from
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.checkpoint.folders import NoCheckpointError
from common.config.schema import PredictConfig
from common.errors import ConfigError, RunError
from common.files import atomic_write, refuse_to_overwrite
from common.generation.beam_search import search_beams
from common.generation.generate import Continuation, Decoder, generate
from common.generation.logit_rules import LogitRules, sequence_biases
from common.generation.prompts import Prompt, sliding_window
from common.generation.sampling import token_text
from common.log import LOG, show
from common.parallel.run import Run
from common.structured_files import read_json_mapping, shown
from common.tokenizer import Tokenizer
from common.training.opened_checkpoint import fingerprint, identity_of
from common.training.start import checkpoint_to_use

RECORD = "generation.json"
_DECISIVE = (
    "min_new_tokens", "max_new_tokens", "window", "top_k", "top_p",
    "repetition_penalty", "stop_at_end_of_text", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "stop", "no_repeat_ngram_size", "min_p",
)  # fmt: skip
"""Settings of predict on which a text depends. The number of texts is not among them."""


def texts_in(folder: Path, prompts: Sequence[Prompt], config: Run) -> set[tuple[int, int]]:
    """Make predict.output_folder, or resume one that exists. Return index and number of the texts that it has.

    Raises StorageError, and ConfigError if its texts come from other weights, settings or prompts.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"predict.output_folder={folder}: is a file; name a folder")
    settings = config.predict
    try:
        weights = identity_of(checkpoint_to_use(config))
    except NoCheckpointError as error:  # an export
        weights = fingerprint(error.where)
    record: dict[str, Any] = {
        "checkpoint": weights,
        "seed": config.seed if settings.seed is None else settings.seed,
        "strategy": settings.method,
        "temperature": settings.temperature or 1.0,
        **{name: getattr(settings, name) for name in _DECISIVE},
        "prompts": [prompt.ids if prompt.is_given_as_ids else prompt.text for prompt in prompts],
    }
    if (folder / RECORD).exists():
        _resume(folder, record)
    with atomic_write(folder / RECORD, "w") as file:
        json.dump(record, file, ensure_ascii=False, indent=1)
    names = (re.fullmatch(r"(\d+)-(\d+)\.txt", path.name) for path in folder.iterdir())
    return {(int(found[1]), int(found[2])) for found in names if found}


def _resume(folder: Path, record: dict[str, Any]) -> None:
    """Check that the folder fits this run. Only the end of the list of prompts may differ."""
    before = read_json_mapping(folder / RECORD)
    unset = PredictConfig().model_dump()  # a folder may be older than a setting
    pairs = [(key, before.get(key, unset.get(key)), value) for key, value in record.items() if key != "prompts"]
    found = before.get("prompts")
    prompts = found if isinstance(found, list) else []
    for number, (old, new) in enumerate(zip(prompts, record["prompts"], strict=False)):
        pairs.append((f"prompt {number}", old, new))
    record["prompts"] += prompts[len(record["prompts"]) :]
    for name, old, new in pairs:
        if old != new:
            quoted = str if name == "checkpoint" else shown  # the ends of paths may differ
            raise ConfigError(
                f"predict.output_folder={folder}: its texts come from {name}={quoted(old)}, and now it is"
                f" {quoted(new)}; choose another folder, or remove this one"
            )


def write_continuations(decoder: Decoder, prompts: Sequence[Prompt], config: Run, tokenizer: Tokenizer) -> None:
    """Generate and print continuations, and write predict.output_file whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    settings = config.predict
    output = Path(settings.output_file) if settings.output_file else None
    if output and output.exists() and not output.is_file():
        raise ConfigError(f"predict.output_file={output}: is not a regular file; give the name of a file")
    if settings.prompt_file and output:
        refuse_to_overwrite([Path(settings.prompt_file)], [output], "give another predict.output_file")
    for remark in _remarks(settings):
        LOG.warning(remark)
    window = sliding_window(config)
    if window and any(len(each.ids) + each.new_tokens > window for each in prompts):
        LOG.warning(
            f"a text may grow beyond {window} tokens: from there on each token is chosen after the"
            f" last {window - 1}, and costs a pass over all of them"
        )
    as_text = output is not None and output.suffix.lower() == ".txt"
    counts = config.logging.style == "gpt2-chinese"
    printer = Printer(of_each=settings.num_sequences, counts=counts)
    folder = Path(settings.output_folder) if settings.output_folder else None
    done = texts_in(folder, prompts, config) if folder else set()
    if done:
        LOG.info(f"{folder}: {len(done)} texts are there already")
    with ExitStack() as stack:
        file = stack.enter_context(atomic_write(output, "w")) if output else None
        stepwise = settings.stream and sys.stdout.isatty()
        for each in continuations(decoder, prompts, config, tokenizer, stepwise=stepwise, done=done):
            if (each.index, each.number) in done:
                continue
            printer.show(each)
            if each.finish_reason is None:
                continue
            whole = each.prompt.text + each.text
            if file is not None and as_text and printer.head:
                file.write(f"{printer.head}{whole.strip()}\n{'=' * 90}\n\n")
            elif file is not None:
                file.write(f"{whole}\n\n" if as_text else _json_line(each, tokenizer))
            if folder:
                with atomic_write(folder / f"{each.index}-{each.number}.txt", "w") as text:
                    text.write(f"{whole.strip()}\n")
        if counts:
            _say("=" * 80 + "\n")


def _remarks(settings: PredictConfig) -> Iterator[str]:
    """Yield warnings of settings that do not do what they seem to."""
    if unused := unused_by_greedy(settings):
        yield unused
    name = settings.output_file
    if settings.logprobs is not None and (not name or name.lower().endswith(".txt")):
        yield (
            f"predict.logprobs={settings.logprobs} without effect: they go into JSON lines; add"
            " predict.output_file=FILE.jsonl"
        )
    for stop in settings.stop:
        if "\\n" in stop:
            yield (
                f"predict.stop={stop} is a backslash and an n, not the end of a line; that is 'predict.stop=[\"\\n\"]'"
            )


def unused_by_greedy(settings: PredictConfig) -> str | None:
    """Return a warning if settings of sampling are given that the strategy ignores."""
    unset = {"temperature": (None, 1.0), "top_k": (0,), "top_p": (1.0,), "min_p": (0.0,)}
    given = {name: getattr(settings, name) for name in unset}
    unused = [f"predict.{name}={value}" for name, value in given.items() if value not in unset[name]]
    takes = {"greedy": "the most probable token", "beam_search": "the most probable sequences"}
    if settings.strategy not in takes or not unused:
        return None
    return (
        f"{' and '.join(unused)} without effect: predict.strategy={settings.strategy} takes"
        f" {takes[settings.strategy]}; set predict.strategy=sampling"
    )


def _json_line(sequence: Continuation, tokenizer: Tokenizer) -> str:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "token": token_text(tokenizer, token), "logprob": logprob}

    record: dict[str, Any] = {
        "prompt": sequence.prompt.text,
        "sequence": sequence.number + 1,
        "continuation": sequence.text,
        "text": sequence.prompt.text + sequence.text,
        "tokens": sequence.tokens,
        "finish_reason": sequence.finish_reason,
    }
    if sequence.prompt.is_given_as_ids:
        record["prompt_ids"] = sequence.prompt.ids
    if sequence.score is not None:
        record["score"] = sequence.score
    if sequence.scored:
        record["logprobs"] = [
            entry(each.id, each.logprob) | ({"top": [entry(*pair) for pair in each.top]} if each.top else {})
            for each in sequence.scored
        ]
    return json.dumps(record, ensure_ascii=False) + "\n"


class Printer:
    """Writes ``Prompt:`` and ``Generation:`` lines, each token once.

    A part of a character, and text that may begin a stop string, wait for the next token. of_each: continuations of a
    prompt. counts: write the banners of GPT2-Chinese's generate.py instead, with the number among the samples of all
    prompts.
    """

    def __init__(self, *, of_each: int, counts: bool) -> None:
        self._of_each, self._counts, self._samples = of_each, counts, 0
        self.head = ""
        """The banner of the current sequence, which is also written into a plain text file."""
        self._shown: int | None = None
        """Characters of the current sequence that are printed; None before its first line."""

    def show(self, sequence: Continuation) -> None:
        """Print the new part of ``sequence``, and the end of its line once it is finished."""
        text = sequence.read()
        shown, self._shown = self._shown, len(text)
        text = self._beginning(sequence) + text if shown is None else text[shown:]
        # a terminal that cannot show a character gets a question mark
        encoding = sys.stdout.encoding or "utf-8"
        _say(text.encode(encoding, "replace").decode(encoding))
        if sequence.finish_reason is not None:
            _say("\n\n" if sequence.number == self._of_each - 1 else "\n")
            self._shown = None

    def _beginning(self, sequence: Continuation) -> str:
        prompt = sequence.prompt.text
        if self._counts:
            self._samples += 1
            self.head = f"{'=' * 40} SAMPLE {self._samples} {'=' * 40}\n"
            return f"{self.head}\n{prompt.lstrip()}"
        number = f" {sequence.number + 1}" if self._of_each > 1 else ""
        title = f"Prompt: {prompt}\n" if sequence.number == 0 else ""
        return f"{title}Generation{number}: {prompt}"


def _say(text: str) -> None:
    try:
        show(text)
    except OSError as error:
        raise RunError(f"standard output: {error.strerror}") from None


def continuations(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    config: Run,
    tokenizer: Tokenizer,
    *,
    stepwise: bool = False,
    done: Container[tuple[int, int]] = (),
) -> Iterator[Continuation]:
    """Return the finished continuations, predict.num_sequences of each prompt, in order.

    stepwise: as in ``generate``; beam search knows its sequences only at the end. done: index and number of those that
    may be left out. Raises ConfigError if there are more beams than the decoder has rows.
    """
    settings = config.predict
    biases = sequence_biases(settings, tokenizer)
    rules = LogitRules(settings, ends=tokenizer.ends, biases=biases)
    if settings.method == "beam_search":
        if decoder.rows < settings.num_beams:
            raise ConfigError(
                f"predict.num_beams={settings.num_beams}: this export takes {decoder.rows} rows at"
                " once; lower it, or leave export.batch_size out when you export"
            )
        return search_beams(decoder, prompts, rules, vocab_size=tokenizer.vocab_size, stream=tokenizer.stream)
    return generate(
        decoder,
        prompts,
        rules,
        vocab_size=tokenizer.vocab_size,
        seed=config.seed if settings.seed is None else settings.seed,
        window=sliding_window(config),
        done=done,
        stepwise=stepwise,
        stream=tokenizer.stream,
    )
