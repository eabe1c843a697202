"""Translation of GPT2-Chinese's command lines and model_config.json, by the rules of ``common.dialects.gpt2_chinese``
and ``hugging_face``. The study DistributedTrainingGPT2 has them too.

Source: Morizeyao/GPT2-Chinese with transformers 2.1.1, and the study.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.aliases import Sources
from common.dialects.gpt2_chinese import (
    DATA,
    EVAL,
    EVAL_DEFAULTS,
    GENERATE,
    GENERATE_DEFAULTS,
    OF_LATER,
    OF_SAMPLES,
    OF_TITLES,
    SINCE_2021,
    SYSTEM,
    TRAIN,
    TRAIN_DEFAULTS,
)
from common.dialects.hugging_face import DEFAULTS, TABLE
from common.dialects.rules import Defaults
from common.errors import ConfigError
from common.paths import ROOT, looked_in
from common.structured_files import read_json_mapping
from common.systems.dialect import Dialect, ForeignKeys, Translation, apply, require_all_taken

TOKENS = "tokenized_train"
"""Stem of the names of the pieces in --tokenized_data_path, and of the .bin/.idx pair made from them."""
_RATES = ("embedding_dropout", "attention_dropout", "hidden_dropout")
_OWN = ROOT / "compat" / "gpt2_chinese"
"""Folder that stands for the users' own, which has config/."""


class _Files(Dialect):
    def translate(self, tree: Mapping[str, Any], sources: Sources) -> Translation:
        """Return our configuration of a model_config.json. Raises ConfigError for one without a
        vocabulary, and for another model.
        """
        ours = Translation()
        for key, value in TRAINING.begin.items():
            ours.set(key, value)
        apply(TRAIN, ForeignKeys(SYSTEM, {}, {}, TRAIN_DEFAULTS), ours)
        _take_sizes(tree, next(iter(sources.values()), SYSTEM).rpartition(":")[0], ours)
        ours.set("data.stride", min(TRAIN_DEFAULTS["stride"], ours.get("model.seq_length")))
        return ours


def _train(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate train.py's flags. Raises ConfigError for a model_config.json that cannot be read.

    Windows are cut from the whole corpus. The original loses the remainders of pieces, and
    gradients that are accumulated for a step that never comes.
    """
    if later := [name for name in SINCE_2021 if name in theirs.names]:
        raise ConfigError(
            f"{theirs.where(later[0])}: a flag of GPT2-Chinese's train.py since April 2021 (PyTorch"
            " Lightning), and the flags before that are taken here; write "
            + ", ".join(f"{SINCE_2021[name]} for --{name}" for name in later)
            + "; its data file, one JSON string a line, can stay"
        )
    _take_model(Path(str(theirs.take("model_config"))), theirs.where("model_config"), ours)
    _take_tokenizer(theirs, ours)
    level = str(theirs.take("fp16_opt_level"))
    if theirs.take("fp16"):
        # training fails with Apex's O3, which keeps no float32 weights; ours keeps them
        level = "pure_fp16" if level == "O3" else level
        ours.set("precision", level, theirs.where("fp16_opt_level"), "fp16_opt_level")
    else:
        ours.note_given(theirs, "fp16_opt_level", "--fp16 is not given")
    # theirs counts micro batches
    lines = -(-theirs.take_count("log_step") // theirs.peek_count("gradient_accumulation"))
    ours.set("logging.interval", lines, theirs.where("log_step"), "log_step")
    _take_data(theirs, ours, "data.train")
    stride, window = theirs.take("stride"), ours.get("model.seq_length")
    if isinstance(stride, int) and isinstance(window, int):
        stride = min(stride, window)  # the original leaves the tokens between windows out, in every epoch
    ours.set("data.stride", stride, theirs.where("stride"), "stride")


def _take_data(theirs: ForeignKeys, ours: Translation, key: str) -> None:
    flag = "tokenized_data_path"
    prefix = Path(str(theirs.take(flag))) / f"{TOKENS}_text_document"
    ours.set(key, str(prefix), theirs.where(flag), flag)
    theirs.take_count("num_pieces")
    shortest = theirs.take_number("min_length")
    if type(shortest) is not int:
        theirs.refuse("min_length", shortest, "expected a whole number")
    for flag in DATA:
        ours.leave_out(theirs, flag, "the data are made before the run")


def _evaluate(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate eval.py's flags.

    Each token is scored once here, except a remainder of less than a window at the end of the corpus. The original
    leaves out the remainder of each piece and the last windows that fill no batch. Its writing of result.txt fails.
    """
    if theirs.peek("pretrained_model") is None:
        raise ConfigError("--pretrained_model is not given; name the trained model, such as model/final_model")
    _take_model(Path(str(theirs.take("model_config"))), theirs.where("model_config"), ours)
    _take_tokenizer(theirs, ours)
    _take_data(theirs, ours, "data.validation")


def _defaults_of_generation(tree: Mapping[str, Any]) -> Defaults:
    """Return the defaults of the program that has these flags.

    --n_ctx, or Lightning's .ckpt as --model_path, is the generate.py since April 2021. It has
    defaults of its own and begins each text with [CLS].
    """
    later = "n_ctx" in tree or str(tree.get("model_path", "")).endswith(".ckpt")
    defaults = GENERATE_DEFAULTS | (OF_TITLES if OF_TITLES.keys() & tree.keys() else OF_SAMPLES)
    return defaults | (OF_LATER if later else {})


def _generate(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate the flags of generate.py, and with flags of titles of generate_texts.py.

    --batch_size k gives k equal samples in the original, and different ones here. --nsamples must
    be a multiple of it. A text has --length tokens and continues after [CLS] with another one, as
    in the original; predict.stop_at_end_of_text=true ends it.
    """
    _take_lengths(theirs, ours)
    _take_tokenizer(theirs, ours)
    if not OF_TITLES.keys() & set(theirs.names):
        start = "[CLS]" if "n_ctx" in theirs.defaults else ""
        ours.set("predict.prompt", f"{start}{theirs.take('prefix')}", theirs.where("prefix"), "prefix")
        ours.set("predict.num_sequences", theirs.take("nsamples"), theirs.where("nsamples"), "nsamples")
        folder = theirs.take("save_samples_path")
        if theirs.take("save_samples"):
            file = str(Path(str(folder)) / "samples.txt")
            ours.set("predict.output_file", file, theirs.where("save_samples"), "save_samples")
        else:
            ours.note_given(theirs, "save_samples_path", "--save_samples is not given")
        return
    titles = theirs.take("titles")
    if file := theirs.take("titles_file"):
        ours.set("predict.prompt_file", str(file), theirs.where("titles_file"), "titles_file")
        ours.note_given(theirs, "titles", "--titles_file has the titles")
    else:
        ours.set("predict.prompt", str(titles).split(), theirs.where("titles"), "titles")
    count, folder = theirs.take("articles_per_title"), str(Path(str(theirs.take("save_path"))))
    ours.set("predict.num_sequences", count, theirs.where("articles_per_title"), "articles_per_title")
    ours.set("predict.output_folder", folder, theirs.where("save_path"), "save_path")


def _take_lengths(theirs: ForeignKeys, ours: Translation) -> None:
    """Take the model from --model_path, as the original does. The window is --n_ctx, or the model's."""
    weights, config = Path(str(theirs.peek("model_path"))), theirs.take("model_config")
    ours.set("output_dir", str(weights.parent), theirs.where("model_path"), "model_path")
    beside = weights / "config.json"
    if beside.is_file():
        _take_model(beside, theirs.where("model_path"), ours)
        ours.note_given(theirs, "model_config", "the weights have a config.json")
    else:
        _take_model(Path(str(config)), theirs.where("model_config"), ours)
    window, length = ours.get("model.seq_length"), theirs.take("length")
    if "n_ctx" in theirs.defaults:
        window = theirs.take_count("n_ctx")
        if theirs.is_left_out("n_ctx"):
            window = min(window, ours.get("model.max_positions"))
    ours.set("predict.window", window, theirs.where("n_ctx"), "n_ctx")
    length = window if length == -1 else length
    ours.set("predict.max_new_tokens", length, theirs.where("length"), "length")


def _take_model(path: Path, where: str, ours: Translation) -> None:
    """Take the model from model_config.json, or from the config.json beside weights.

    where: the place that names the file, which may be one of GPT2-Chinese's own. Raises ConfigError
    for a missing file or size.
    """
    file = next(filter(Path.is_file, (path, _OWN / path)), None)
    if file is None:
        raise ConfigError(
            f"{where}: {path}: {'is a folder' if path.is_dir() else f'no such file{looked_in(path)}'}; expected"
            " GPT2-Chinese's model_config.json, with n_ctx, n_embd, n_head, n_layer and vocab_size"
        )
    _take_sizes(read_json_mapping(file), str(file), ours)


def _take_sizes(fields: Mapping[str, Any], path: str, ours: Translation) -> None:
    """Take the model from the fields of a model_config.json or config.json."""
    theirs = ForeignKeys(SYSTEM, fields, dict.fromkeys(((name,) for name in fields), path), DEFAULTS)
    positions = theirs.peek("n_positions")
    if theirs.is_left_out("n_ctx") and isinstance(positions, int):
        ours.set("model.seq_length", min(positions, DEFAULTS["n_ctx"]))
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    rates = {name: ours.tree["model"][name] for name in _RATES}
    if len(set(rates.values())) == 1:  # one key, which model.dropout=0 of a user then replaces
        for name in _RATES:
            del ours.tree["model"][name]
        ours.set("model.dropout", rates[_RATES[0]], theirs.where("embd_pdrop"), "embd_pdrop")
    if ours.get("model.vocab_size") is None:
        raise ConfigError(f"{path}: vocab_size missing; give the number of lines of the vocabulary")


def _take_tokenizer(theirs: ForeignKeys, ours: Translation) -> None:
    """Take the kind and the files of the tokenizer, by --segment and --bpe_token."""
    of_words, of_bpe = ("tokenizer_path", "segment"), ("encoder_json", "vocab_bpe")
    given = {flag: theirs.take(flag) for flag in (*of_words, *of_bpe, "bpe_token")}
    if given["bpe_token"]:
        is_model = str(given["encoder_json"]).endswith(".model")
        kind, switch = "SentencePieceTokenizer" if is_model else "GPT2BPETokenizer", "bpe_token"
        files = {"vocab_file": "encoder_json"} | ({} if is_model else {"merge_file": "vocab_bpe"})
        unused, why = of_words, "--bpe_token takes --encoder_json"
    else:
        kind, switch = "BertWordLevel" if given["segment"] else "BertWordPieceLowerCase", "segment"
        files, unused, why = {"vocab_file": "tokenizer_path"}, of_bpe, "it is for --bpe_token"
    ours.set("data.tokenizer.type", kind, theirs.where(switch), switch if given[switch] else "")
    for key, flag in files.items():
        ours.set(f"data.tokenizer.{key}", str(given[flag]), theirs.where(flag), flag)
    for flag in unused:
        ours.note_given(theirs, flag, why)


TRAINING = Dialect(
    system=SYSTEM, table=TRAIN, defaults=TRAIN_DEFAULTS,
    # AdamW of transformers 2.1.1, a learning rate that falls to 0, all documents for training, and
    # a model after each epoch
    begin={
        "seed": 1234, "precision": "float32",
        "optimizer.name": "adamw", "optimizer.schedule": "linear",
        "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.epsilon": 1e-6,
        "optimizer.weight_decay": 0.0, "data.split": "1,0,0", "checkpoint.epoch_models": True,
        "logging.style": "gpt2-chinese",
    },
    parts=(_train,), programs=("train.py", "train_single.py"),
)  # fmt: skip
GENERATION = Dialect(
    system=SYSTEM, table=GENERATE, defaults=GENERATE_DEFAULTS, defaults_of=_defaults_of_generation,
    begin={
        "seed": 1234, "optimizer.learning_rate": 1.5e-4, "logging.style": "gpt2-chinese",
        "predict.strategy": "sampling", "predict.stop_at_end_of_text": False,
    },
    parts=(_generate,), programs=("generate.py", "generate_texts.py"),
)  # fmt: skip
EVALUATION = Dialect(
    system=SYSTEM, table=EVAL, defaults=EVAL_DEFAULTS,
    begin={"seed": 1234, "optimizer.learning_rate": 1.5e-4, "logging.style": "gpt2-chinese"},
    parts=(_evaluate,), programs=("eval.py",),
)  # fmt: skip
FILES = _Files(
    system=SYSTEM, table=TABLE, defaults=DEFAULTS, base="_base_config",
    marks=frozenset({"n_ctx", "n_embd", "n_head", "n_layer", "model_type"}),
)  # fmt: skip
"""model_config.json, with the defaults of train.py. Data, tokenizer and run folder are given with
keys of this project.
"""
