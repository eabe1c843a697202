"""Run GPT2-Chinese's commands: their flags become a configuration of run_gpt2.py.

The data are made before the run. Every rank of a run comes here. The first rank does the work; the
others wait and find it done.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.cluster.environment import find_process
from common.config.hints import schema_keys
from common.dataset.corpus import open_corpus
from common.dataset.id_files import numbered_files
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.dialects.gpt2_chinese import OF_SAMPLES, OF_TITLES, SINCE_2021
from common.dialects.rules import Ignored, MapTo
from common.errors import ConfigError, DataError
from common.files import atomic_write, held_lock
from common.log import LOG, show, start_log
from common.paths import looked_in
from common.structured_files import read_json_mapping
from common.systems.config import COMMAND_LINES, Opened, find_command_line, open_flags
from common.systems.dialect import Dialect
from common.systems.flags import read_flags
from common.systems.gpt2_chinese import GENERATION, TOKENS
from common.tokenizer import require_files

_MODES = {"gpt2_chinese": "train", "gpt2_chinese_generate": "predict", "gpt2_chinese_eval": "eval"}
"""Run mode of the commands of a key of COMMAND_LINES."""


def run_command(main: Callable[..., int], program: str, words: Sequence[str]) -> int:
    """Start ``main`` of run_gpt2.py with the arguments that the flags of ``program`` become; return its exit code.

    Words of the form section.key=value are overrides; --show_config prints the YAML and starts nothing. --prepare
    makes the data and starts nothing, so that a refusal comes once, before ranks. Raises GPT2Error and OSError.
    """
    system = find_command_line((), program)
    dialect, mode = COMMAND_LINES[system], _MODES[system]
    if {"--help", "-h"} & set(words):
        show(_help(program, dialect))
        return 0
    theirs, overrides = _split(words)
    given = {word.lstrip("-").partition("=")[0] for word in theirs if word.startswith("--")}
    if program == "generate_texts.py" and not given & OF_TITLES.keys():
        theirs += ["--titles", OF_TITLES["titles"]]
    opened = open_flags(system, theirs, overrides)
    if "--show_config" in words:
        show(opened.yaml)
        return 0
    process = find_process(os.environ)
    start_log(rank=process.rank)
    flags = {**dialect.defaults, **read_flags(theirs, "command line", dialect.table)[0]}
    if "device" in flags:
        devices = str(flags["device"])
        count = len(devices.split(","))
        if mode == "train" and "--prepare" not in words and process.world_size == 1 and count > 1:
            LOG.warning(
                f"--device {devices}: one process trains on one device; for {count}, start torchrun"
                f" --nproc_per_node={count} with this command"
            )
        # as CUDA_VISIBLE_DEVICES does there, unless the user has hidden some
        for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
            os.environ.setdefault(name, devices)
    if mode != "predict":
        make_data(flags, opened, framed=program != "train_single.py")
    if "--prepare" in words:
        return 0
    return _run(main, program, mode, opened, process.rank)


def _run(main: Callable[..., int], program: str, mode: str, opened: Opened, rank: int) -> int:
    """Run the YAML made from the flags; a training leaves it in its folder, and a refused one the folder as it was."""
    folder = Path(opened.config.output_dir)
    kept, told = folder / f"{Path(program).stem}.yaml", "--show_config prints the YAML that the flags became"
    if mode == "train":
        told = f"the flags became {kept}; python run_gpt2.py --config {kept} --run_mode train does the same now"
    with tempfile.TemporaryDirectory(prefix="gpt2-chinese-") as temporary:
        # other ranks have copies of their own
        file = kept if mode == "train" and rank == 0 else Path(temporary) / kept.name
        before = file.read_bytes() if file.is_file() else None
        with atomic_write(file, "w") as text:
            text.write(opened.yaml)
        LOG.info(f"{program}: {told}")
        code = main(["--config", str(file), "--run_mode", mode], program=program)
        if code == 2 and before is not None:
            with atomic_write(file) as old:
                old.write(before)
        elif code == 2 and file == kept and [*folder.iterdir()] == [kept]:
            shutil.rmtree(folder)
    if mode == "eval" and code == 0 and rank == 0:
        result = read_json_mapping(folder / "evaluation.json", error=DataError)
        with atomic_write(folder / "result.txt", "w") as text:
            text.write(f"{result['validation_perplexity']}\n")
    return code


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of that program, and overrides in this project's form among them."""
    overrides = [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if before not in ("--prefix", "--titles")
        and not word.startswith("-")
        and word.partition("=")[1]
        and word.partition("=")[0].partition(".")[0] in schema_keys()
    ]
    theirs = [word for word in words if word not in (*overrides, "--show_config", "--prepare")]
    return theirs, overrides


_FOLLOWED = {
    "device": "numbers of the GPUs or NPUs to use, such as 0,1,2,3",
    "min_length": "texts of this many characters or fewer are left out",
    "num_pieces": "files that the tokenized texts are divided over",
    "raw": "tokenize --raw_data_path first",
}
"""Flags that are no key of the YAML alone, and their meaning."""


def _help(program: str, dialect: Dialect) -> str:
    """Return the text of --help: each flag, what it becomes here, and its default."""
    example = f"{program} --model_config config/model_config_small.json"
    lines = [
        f"usage: {program} FLAGS [section.key=value ...] [--show_config]",
        "",
        f"Run GPT2-Chinese's {program} with this project's engine.",
        "",
        f"    python {example} --show_config",
        "        print the YAML that the flags become, and start nothing",
        f"    python {example} --prepare",
        "        check the flags and make the data, and start nothing",
        "",
        "flags:",
    ]
    defaults = {**dialect.defaults, **(OF_SAMPLES | OF_TITLES if dialect is GENERATION else {})}
    for flag in sorted(dialect.table):
        rule = dialect.table[flag]
        if flag in _FOLLOWED:
            becomes = _FOLLOWED[flag]
        elif flag in SINCE_2021:
            becomes = f"refused: of the train.py since April 2021; write {SINCE_2021[flag]}"
        elif isinstance(rule, Ignored):
            becomes = f"no effect here: {rule.why}"
        else:
            becomes = f"sets {rule.key if isinstance(rule, MapTo) else rule.hint}"
        default = f" (default: {defaults[flag]})" if defaults.get(flag, "") != "" else ""
        lines.append(f"  --{flag:<22}{becomes}{default}")
    lines += ["", "Exit codes: those of run_gpt2.py.", ""]
    return "\n".join(lines)


def make_data(flags: Mapping[str, Any], opened: Opened, *, framed: bool) -> None:
    """Make the pieces of --tokenized_data_path if --raw asks for it, and from them the .bin/.idx pair of the run.

    Work that is done and up to date is skipped. framed: put the tokenizer's frame around each text, which
    train_single.py does not. Raises DataError, TokenizerError and StorageError.
    """
    folder = Path(str(flags["tokenized_data_path"]))
    wish = opened.config.data.tokenizer
    if wish is None or wish.vocab_file is None:
        raise ConfigError("data.tokenizer.vocab_file is not given; name it with --tokenizer_path")
    options = PreprocessOptions(
        inputs=(folder,),
        input_format="ids",
        output_prefix=folder / TOKENS,
        tokenizer_type=wish.type,
        vocab_file=Path(wish.vocab_file),
        merge_file=None if wish.merge_file is None else Path(wish.merge_file),
        tokenizer_backend=wish.backend,
        special_tokens="tokens",
    )
    if not flags.get("raw") and not any(folder.glob(f"{TOKENS}_*")):
        raise DataError(
            f"{folder}: no {TOKENS}_0.txt{looked_in(folder)}; add --raw, which makes the pieces of --raw_data_path"
        )
    require_files(options.vocab_file, options.merge_file)
    raw = Path(str(flags["raw_data_path"])) if flags.get("raw") else None
    if raw is not None:
        found = open_corpus(raw).format
        if found not in ("array", "jsonl"):  # GPT2-Chinese reads both since 2021
            raise DataError(
                f"{raw}: is {found}, expected a JSON array of texts or a JSON string on each"
                " line; for other files make the pair with tools/preprocess_data.py"
            )
    with one_at_a_time(folder):
        if raw is not None:
            least = int(flags.get("min_length", 0)) if framed else 0
            sizes: dict[str, Any] = {"min_length": least, "num_pieces": int(flags["num_pieces"])}
            of_raw = replace(options, inputs=(raw,), input_format=found, format="pieces", append_eod=framed, **sizes)
            _once(folder / ".pieces.json", {"framed": framed, **sizes}, of_raw, (raw,))
        if (folder / f"{TOKENS}_0.txt").is_file():
            _once(folder / ".pair.json", {}, options, numbered_files(folder))


def _once(stamp: Path, made_of: dict[str, Any], options: PreprocessOptions, inputs: Sequence[Path]) -> None:
    """Preprocess, unless ``stamp`` says that this was done with the same files and settings."""
    files = [*inputs, options.vocab_file, *filter(None, (options.merge_file,))]
    states = {str(file): file.stat() for file in files if file.exists()}
    made_of["tokenizer"] = options.tokenizer_type
    made_of["files"] = {name: [each.st_size, each.st_mtime_ns] for name, each in states.items()}
    if stamp.is_file() and read_json_mapping(stamp, error=DataError) == made_of:
        return
    done = preprocess(options)
    with atomic_write(stamp, "w") as file:
        json.dump(made_of, file, ensure_ascii=False, indent=1)
    LOG.info(
        f"{inputs[0].parent if len(inputs) > 1 else inputs[0]}: {done.documents} documents,"
        f" {done.tokens} tokens{done.left_out()}"
    )


@contextmanager
def one_at_a_time(folder: Path, limit: float = 6 * 3600.0) -> Iterator[None]:
    """Wait until no other process is in this block for the same folder, at most ``limit`` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            told = partial(LOG.info, f"{folder}: another process makes data there; waiting for it")
            stack.enter_context(held_lock(folder / ".lock", limit, told))
        except TimeoutError:
            raise ConfigError(f"{folder}: another process has worked there for {limit:g} s; end that first") from None
        except OSError as error:  # such as a read-only mount with prepared data
            LOG.debug(f"{folder}: no lock ({error.strerror or error})")
        yield
