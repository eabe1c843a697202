"""Weights and runs from format to format: against transformers, MindSpore's own loading, and bit for
bit there and back.
"""

import dataclasses
import errno
import importlib.util
import itertools
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from types import ModuleType  # noqa: E402

from common.checkpoint.folders import NoCheckpointError, require_checkpoint  # noqa: E402
from common.checkpoint.manifest import write_manifest  # noqa: E402
from common.config.resolved import resolve_model  # noqa: E402
from common.config.schema import ModelConfig  # noqa: E402
from common.conversion.convert import convert, convert_as_mindformers_did, warn_of_heads  # noqa: E402
from common.errors import CheckpointError, ConfigError, StorageError  # noqa: E402
from common.systems.hugging_face.weights import write_hugging_face  # noqa: E402
from common.systems.table import FORMATS, detect, explain  # noqa: E402
from common.systems.weights import Weights  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402
from common.training.opened_checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from tests.common.systems.tiny_weights import as_weights, random_arrays, refused  # noqa: E402
from tests.reference import hugging_face_model  # noqa: E402
from tests.tiny import SGD, require_same_bits, rows_of, tiny_run, train_here  # noqa: E402
from tools.convert_weight import main  # noqa: E402

MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_heads=4, seq_length=9, vocab_size=101, ffn_hidden_size=96, max_positions=9,
    embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, initializer_range=0.3,
)  # fmt: skip
IDS = torch.arange(18).reshape(2, 9) * 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of transformers' model."""
    return save(theirs(), tmp_path / "hf", "safetensors")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def theirs() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, n_positions=9, vocab_size=101, n_inner=96, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def run(source: Path, target: Path, to: str, **more: Any) -> Path:
    convert(source, target, target_format=to, **({"verify": True} | more))
    return target


def save(model: Any, folder: Path, form: str) -> Path:
    """Checkpoint folder as transformers writes it."""
    is_whole = form == "safetensors"
    model.save_pretrained(folder, max_shard_size="1GB" if is_whole else "10KB")
    assert (folder / "model.safetensors.index.json").is_file() != is_whole
    if form == "old shards":  # names in turn, so that both are needed for every block
        for file in folder.glob("model*"):
            file.unlink()
        state = model.state_dict()
        places = {name: f"pytorch_model-{n % 2 + 1}-of-2.bin" for n, name in enumerate(state)}
        for file in {*places.values()}:
            part = {name: tensor for name, tensor in state.items() if places[name] == file}
            torch.save(part, folder / file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["safetensors", "shards", "old shards"])
def test_a_model_of_transformers_gives_the_same_logits_here(tmp_path: Path, form: str) -> None:
    model = theirs()
    source = save(model, tmp_path / "source", form)
    assert detect(source) == "hf"
    checkpoint = Checkpoint(run(source, tmp_path / "ours", "torch_gpt2"))
    ours = {name: torch.from_numpy(np.array(x)) for name, x in checkpoint.weights(MODEL)}
    np.testing.assert_array_equal(logits(hugging_face_model(MODEL, ours)), logits(model))


def test_the_command_line_of_mindformers(tmp_path: Path, capsys: Any) -> None:
    state, file = theirs().state_dict(), tmp_path / "pytorch_model.bin"
    torch.save(state, file)
    target = tmp_path / "gpt2.ckpt"
    words, two = ["--torch_path", str(file), "--mindspore_path", str(target)], ["--layers", "2"]
    assert main([*words, *two]) == 0
    found = open_tensors(target)
    assert len(found) == 16 * 2 + 4
    query = found["backbone.blocks.1.attention.dense1.weight"].read()
    np.testing.assert_array_equal(query, state["transformer.h.1.attn.c_attn.weight"][:, :24].T)
    empty, before = str(tmp_path / "empty.bin"), target.read_bytes()
    torch.save({"wte.weight": torch.zeros(0, 4)}, empty)
    (tmp_path / "taken").mkdir()
    for more, fault in (
        ([*two, "--torch_path", empty], "vocab_size=0 of the model"),
        ([*two, "--mindspore_path", f"{tmp_path}/taken"], "taken/gpt2.ckpt"),
        ([*two, "--mindspore_path", f"{file}/a.ckpt"], "could not be written: File exists"),
        ([*two, "--torch_path", f"{tmp_path}/gone.bin"], "gone.bin: does not exist in"),
        (["--layers", "1"], "has 2 blocks, and --layers says 1; say --layers 2"),
        ([], "--layers says 12; say --layers 2"),  # MindFormers' default
        ([*two, "--verify"], "go together, and with nothing else"),
    ):
        assert main([*words, *more]) == (1 if "be written" in fault else 2)
        assert fault in capsys.readouterr().err and target.read_bytes() == before
    new = tmp_path / "new" / "gpt2.ckpt"
    assert main([*words, *two, "--mindspore_path", str(new)]) == 0
    assert new.read_bytes() == before and list(new.parent.iterdir()) == [new]
    assert not list(tmp_path.glob(".*")), "nothing is left"


def random_weights(model: ModelConfig, dtype: str) -> Weights:
    """Float32 of any bits, with NaNs, infinities and -0 too; finite bfloat16."""
    arrays, words = random_arrays(model), np.random.default_rng(0)
    for name, array in arrays.items():
        if dtype == "float32":
            arrays[name] = words.integers(0, 2**32, array.shape, np.uint32).view(np.float32)
        elif dtype == "bfloat16":
            arrays[name] = words.integers(0, 0x7F80, array.shape, np.uint16)
        else:
            arrays[name] = array.astype(dtype)
    return as_weights(model, arrays, dtype)


WAYS: list[tuple[str, tuple[int, ...], list[tuple[Any, ...]]]] = [
    # blocks, heads, width of a head, inner width, places, tokens, multiple of rows; formats with their ranks
    ("float16", (1, 1, 1, 1, 1, 1, 1), [("hf",), ("mindformers",), ("megatron", 1, 1), ("hf",)]),
    ("bfloat16", (4, 4, 3, 12, 9, 37, 8), [("megatron", 2, 2), ("megatron_core", 4, 4), ("mindformers_r0.3",)]),
    ("float32", (3, 2, 5, 24, 5, 40, 128), [("mindformers",), ("torch_gpt2",), ("megatron", 2, 3), ("hf",)]),
    ("float32", (2, 3, 4, 24, 7, 33, 8), [("mindformers_r0.3",), ("megatron_core", 3, 1), ("megatron", 1, 2)]),
    ("bfloat16", (2, 1, 5, 7, 3, 8, 8), [("hf",), ("megatron_core", 1, 2), ("hf",)]),
]


@pytest.mark.parametrize(("dtype", "sizes", "way"), WAYS)
def test_there_and_back_bit_for_bit(
    tmp_path: Path, dtype: str, sizes: tuple[int, ...], way: list[tuple[Any, ...]]
) -> None:
    """Odd models, by formats with the tensor and pipeline ranks that divide them."""
    layers, heads, width, inner, places, vocabulary, multiple = sizes
    model = ModelConfig(
        num_layers=layers, num_heads=heads, hidden_size=heads * width, ffn_hidden_size=inner, seq_length=1,
        max_positions=places, vocab_size=vocabulary, vocab_multiple=multiple,
        embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    weights = random_weights(model, dtype)
    (tmp_path / "0").mkdir()
    FORMATS[way[0][0]].write(tmp_path / "0", weights, None)
    for number, ((one, *_), (other, *ranks)) in enumerate(itertools.pairwise(way), 1):
        shards = dict(zip(("model_parallel", "pipeline_stage"), ranks, strict=False))
        target = tmp_path / str(number)
        run(tmp_path / str(number - 1), target, other, source_format=one, **shards)
    found = FORMATS[way[-1][0]].open(target)
    assert found.tensors.keys() == weights.tensors.keys()
    for size in ("num_heads", "vocab_size"):
        assert getattr(found.model, size) == getattr(model, size)
    for name, tensor in found.tensors.items():
        assert tensor.dtype == dtype
        assert tensor.load().tobytes() == weights.tensors[name].load().tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_are_rounded_as_torch_does(source: Path, tmp_path: Path, dtype: str) -> None:
    folder = run(source, tmp_path / dtype, "hf", dtype=dtype)
    found = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    expected = theirs().to(getattr(torch, dtype)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_types_that_cannot_hold_the_weights(source: Path, capsys: Any) -> None:
    refused(capsys, source, "our own folders hold float32, or int8", "--dtype", "float16", to="torch_gpt2")
    (source / "model.safetensors").unlink()
    torch.save({name: x * 1e6 for name, x in theirs().state_dict().items()}, source / "pytorch_model.bin")
    refused(capsys, source, r"weight of .* would be infinite", "--dtype", "float16", to="mindformers")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hff", r"hff: does not exist in {0}; did you mean hf\?$"),
        ("gpt2", "gpt2: does not exist in {0}; give a path, or hf://OWNER/NAME for a model of"),
        ("hff/b.bin", r"hff: does not exist in {0}; did you mean hf\?$"),
        ("hf/typo.safetensors", "hf/typo.safetensors: does not exist in .*model.safetensors"),
    ],
)
def test_a_path_that_is_not_there(source: Path, tmp_path: Path, monkeypatch: Any, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    for format in (None, "hf"):
        with pytest.raises(ConfigError, match=message.format(tmp_path)):
            run(Path(name), tmp_path / "out", "mindformers", source_format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_a_scheduler_and_a_folder_in_use(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(source, tmp_path / "out", "hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    full, stopped = OSError(errno.ENOSPC, "No space left on device"), SystemExit(143)  # as after SIGTERM
    for fault, expected in ((full, StorageError), (stopped, SystemExit)):
        monkeypatch.setattr("common.systems.run_state.dump_yaml", Mock(side_effect=fault))
        with pytest.raises(expected, match=r"the weights could not be written|143"):
            run(source, tmp_path / "other", "mindformers")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("to", ["torch_gpt2", "mindformers", "megatron", "megatron_core"])
def test_tensors_go_from_the_mapped_file_to_the_disk_without_a_copy_of_their_own(tmp_path: Path, to: str) -> None:
    """Memory is less than any matrix needs, transposed, cut or fused, and the table of tokens."""
    large = {"hidden_size": 640, "num_heads": 10, "ffn_hidden_size": 2560, "vocab_size": 5003, "max_positions": 1024}
    model = resolve_model(MODEL.model_copy(update=large))
    given = random_arrays(model)
    (tmp_path / "hf").mkdir()
    write_hugging_face(tmp_path / "hf", as_weights(model, given), None)
    ranks = {"model_parallel": 2, "pipeline_stage": 2} if "megatron" in to else {}
    convert(tmp_path / "hf", tmp_path / "warm", target_format=to, **ranks)
    tracemalloc.start()
    try:
        convert(tmp_path / "hf", tmp_path / "out", target_format=to, **ranks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < min(array.nbytes for array in given.values() if array.ndim == 2) // 2
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sum(size > 2**20 for size in sizes) == 4 ** bool(ranks)  # without YAML and JSON


def test_places_to_write_to(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dangling", "link"):
        (tmp_path / name).symlink_to(target := tmp_path / f"{name} 目标")
        if name == "link":
            target.mkdir()
        run(source, tmp_path / name, "mindformers")
        assert (tmp_path / name).is_symlink() and (target / "gpt2.ckpt").is_file()
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    message = "is the current folder, which would be replaced; give the name of one"
    with pytest.raises(ConfigError, match=message):
        run(source, Path(), "hf")
    message = r"model.safetensors is both an input and an output.*another --mindspore_path"
    with pytest.raises(ConfigError, match=message):
        convert_as_mindformers_did(2, source / "model.safetensors", source / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == before | {"here"}


def flip(folder: Path) -> None:
    """Change a bit of a checkpoint of ours, and its checksum."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["crc32"] = zlib.crc32(data)
    write_manifest(folder, manifest)


@pytest.mark.parametrize(
    ("to", "damage", "message"),
    [
        ("torch_gpt2", flip, "read back, ln_f.bias differs"),
        ("torch_gpt2", lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json"),
    ],
)
def test_the_converter_reads_its_result(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, damage: Any, message: str
) -> None:
    """What cannot be opened is not left there, also without --verify, which compares the bits."""
    format = FORMATS[to]

    def damaged(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
        sums = format.write(folder, weights, dtype)  # type: ignore[misc]
        damage(folder)
        return sums

    monkeypatch.setitem(FORMATS, to, dataclasses.replace(format, write=damaged))
    if damage is not flip:
        message = rf"hf: what was made of it cannot be read back: {message}: .*fix or remove it"
    with pytest.raises(CheckpointError, match=message):
        run(source, tmp_path / "out", to, verify=damage is flip)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("torch_gpt2", None),
        ("mindspore", None),
        ("mindformers", "no framework here runs the mindformers format"),
        ("torch_gpt2", "transformers, which computes the logits of hf, is not installed"),
    ],
)
def test_verify_computes_the_logits_of_both_sides(
    source: Path, tmp_path: Path, target: str, reason: str | None, capsys: Any, monkeypatch: Any
) -> None:
    """transformers' against those of either backend; where nothing runs a format, that is said."""
    if target == "mindspore":
        pytest.importorskip("mindspore")
    find = importlib.util.find_spec
    if reason and "installed" in reason:
        missing: Any = lambda name, *more: None if name == "transformers" else find(name, *more)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", missing)
    words = ["--input", str(source), "--output", str(tmp_path / target), "--to", target]
    assert main([*words, "--verify"]) == 0
    told = capsys.readouterr().out
    found = json.loads((tmp_path / target / "conversion.json").read_text())["logits"]
    if reason:
        assert found == {"compared": False, "reason": reason} and reason in told
        return
    assert 0 < found["largest_difference"] < 1e-5 * found["largest_logit"]
    assert "logits: largest difference" in told


@pytest.mark.parametrize(
    ("width", "heads", "said"),
    [(192, 3, ""), (192, 8, "8 heads, where a GPT-2 of width 192 has 12 or 6 or 3;"), (5120, 40, ""), (10, 2, "")],
)
def test_unusual_heads_are_said_at_any_width(caplog: Any, width: int, heads: int, said: str) -> None:
    warn_of_heads(Path("x"), MODEL.model_copy(update={"hidden_size": width, "num_heads": heads}))
    assert bool(caplog.records) == bool(said) and said in caplog.text


def test_logits_that_differ_are_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(path: Path, theirs: Any, wrong: float = 1.001) -> Any:
        monkeypatch.setattr("torch_gpt2.predict.hugging_face_logits", theirs)
        monkeypatch.setattr("torch_gpt2.predict.logits", lambda *_: np.full((2, 9, 101), wrong))
        return convert(path, tmp_path / "ours", target_format="torch_gpt2", source_format="hf", verify=True)

    def ones(*_: Any) -> np.ndarray:
        return np.ones((2, 9, 101))

    differ = r"its logits .torch_gpt2. differ by"
    failed = "its framework for hf could not run it: 3; convert without --verify"
    for theirs, wrong, message in ((ones, 1.001, differ), (ones, np.nan, differ), (lambda *_: {}[3], 1, failed)):
        with pytest.raises(CheckpointError, match=message):
            compare(source, theirs, wrong)
        assert not (tmp_path / "ours").exists()
    alone = compare(source / "model.safetensors", ones)
    assert "prefer another file" in alone["logits"]["reason"]


# ---- where a checkpoint of ours is expected ----

INIT, LOAD = "checkpoint.init_from", "the run in output_dir, or checkpoint.load"
INSTEAD = (
    # where, for what, and the end of the message; only a model's name may be one of the hub
    ("hf/config.json", INIT, ": it is a Hugging Face folder; give checkpoint.init_from=hf"),
    ("hf", "checkpoint.resume=latest", ": it is a Hugging Face folder; give checkpoint.resume=hf"),
    ("hf", LOAD, ": it is a Hugging Face folder; give checkpoint.load=hf"),
    ("ours/model.safetensors", INIT, ": it is a file of a checkpoint; give the folder ours"),
    ("gpt2", INIT, "(looked in {0}); a model of the Hugging Face hub is named as hf://OWNER/NAME"),
    ("there/gpt2", INIT, "there is no such file or folder (looked in {0})"),
    ("there", INIT, "expected a run folder, its checkpoints folder"),
)


def test_what_is_there_instead_and_what_to_give(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message says to give is taken."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    run(source, Path("ours"), "torch_gpt2")
    for where, why, said in INSTEAD:
        with pytest.raises(NoCheckpointError) as caught:
            require_checkpoint(Path(where), why)
        message = f": {explain(caught.value.where, caught.value.why)}"
        assert said.format(tmp_path) in message
        assert ("hf://" in message) == ("hf://" in said), message
    assert open_checkpoint(Path("hf"), "x").is_foreign
    assert not open_checkpoint(Path("ours"), "x").is_foreign


ADAMW = {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 6, "weight_decay": 0.1}
FLOAT16 = {"precision": {"compute": "float16"}, "loss_scale": {"mode": "dynamic", "initial": 1024, "window": 2}}


def train(folder: Path, prefix: Path, steps: int = 2, **changes: Any) -> Path:
    changes = {"optimizer": ADAMW, "model__hidden_dropout": 0.1} | changes
    return train_here(tiny_run(folder, prefix, train__max_steps=steps, **changes))


@pytest.mark.parametrize(
    ("way", "changes"),
    [(["mindformers", "megatron"], FLOAT16), (["torch_gpt2", "mindformers_r0.3", "megatron_core"], {"optimizer": SGD})],
)
def test_a_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path, way: list[str], changes: dict[str, Any]
) -> None:
    """Moments, step, schedule, loss scale, place in the data and dropout masks."""
    whole = train(tmp_path / "whole", corpus_prefix, 6, **changes)
    before = train(tmp_path / "half", corpus_prefix, 3, **changes)
    for number, target in enumerate([*way, "torch_gpt2"]):
        ranks = {"model_parallel": 2, "pipeline_stage": 2} if FORMATS[target].has_ranks else {}
        result = convert(before, tmp_path / str(number), target_format=target, verify=True, **ranks)
        assert result["step"] == 3
        before = tmp_path / str(number)
    resumed = {"checkpoint__resume": str(before), **changes}
    require_same_bits(train(tmp_path / "resumed", corpus_prefix, 6, **resumed), whole, last=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "run", corpus_prefix)


def test_training_says_that_it_does_not_begin_at_checkpoint_load(
    trained: Path, tmp_path: Path, corpus_prefix: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, corpus_prefix, 1, checkpoint__load=str(trained))
    assert "not for training; set checkpoint.resume to resume from it" in caplog.text
    assert rows_of(tmp_path)[0]["step"] == 1


def test_weights_without_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(to: str, name: str, *more: str) -> str:
        words = ["--input", str(trained), "--output", str(tmp_path / name), "--verify", *more]
        assert main([*words, "--to", to]) == 0
        return capsys.readouterr().out

    whole = told("mindformers", "run")
    assert "36 parameters" in whole
    assert "and the run at step 2 with 72 tensors of the optimizer, read back and equal" in whole
    alone = told("mindformers", "alone", "--weights_only")
    assert "not written: 72 x state of the optimizer" in alone
    assert "not written: run (where training stood)" in told("hf", "hf")
    run, alone_file = (open_tensors(tmp_path / name / "gpt2.ckpt") for name in ("run", "alone"))
    assert len(alone_file) == 36 and len(run) == 3 * 36 + 3 and run["step_num"].read() == 2


def test_a_checkpoint_of_mindspore_itself(tmp_path: Path, mindspore: ModuleType, trained: Path) -> None:
    """Its optimizers name their state, and save_checkpoint its counters."""
    ms, folder, back = mindspore, tmp_path / "theirs", tmp_path / "back"
    assert convert(trained, folder, target_format="mindformers", weights_only=True)["step"] is None
    loaded = list(ms.load_checkpoint(str(folder / "gpt2.ckpt")).values())
    optimizer = ms.nn.AdamWeightDecay(loaded, learning_rate=0.1)
    gradients = [np.random.default_rng(0).random(parameter.shape, np.float32) for parameter in loaded]
    optimizer(tuple(map(ms.Tensor, gradients)))
    counters = {"step_num": 7, "epoch_num": 1, "loss_scale": 512.0}
    ms.save_checkpoint(optimizer, str(folder / "gpt2.ckpt"), append_dict=counters)
    result = convert(folder, back, target_format="mindspore", verify=True)
    assert result["step"] == 7
    assert "reads from the first sample" in result["ignored"]["position in the data"]
    engine = json.loads((back / "manifest.json").read_text())["engine"]
    assert (engine["optimizer_steps"], engine["loss_scale"]["value"]) == (1, 512)
    of = dict(zip([parameter.name for parameter in loaded], gradients, strict=True))
    found = open_tensors(back / "optimizer.safetensors")
    averages, squares = found["h.1.mlp.c_fc.weight.exp_avg"], found["h.0.attn.k_proj.bias.exp_avg_sq"]
    wide, narrow = of["backbone.blocks.1.output.mapping.weight"], of["backbone.blocks.0.attention.dense2.bias"]
    np.testing.assert_allclose(averages.read(), 0.1 * wide.T, rtol=1e-5)
    np.testing.assert_allclose(squares.read(), 0.001 * narrow**2, rtol=1e-4)


def test_files_that_do_not_belong_together_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    convert(trained, folder, target_format="mindformers")
    text = (folder / "model.yaml").read_text()
    (folder / "model.yaml").write_text(text.replace("optimizer_steps: 2", "optimizer_steps: 5"))
    message = r"global_step is 2.0, and model.yaml says 5: they are of two runs"
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "out", target_format="torch_gpt2")
    assert not (tmp_path / "out").exists()
