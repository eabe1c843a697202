"""Weights from format to format: against transformers, MindSpore's own loading, and bit for bit
there and back.
"""

import dataclasses
import errno
import importlib.util
import itertools
import json
import os
import runpy
import signal
import sys
import tracemalloc
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.checkpoint.manifest import write_manifest  # noqa: E402
from common.config.resolved import resolve_model  # noqa: E402
from common.config.schema import ModelConfig  # noqa: E402
from common.conversion.convert import convert, convert_as_mindformers_did, warn_of_heads  # noqa: E402
from common.errors import CheckpointError, ConfigError, StorageError  # noqa: E402
from common.systems.hugging_face.weights import write_hugging_face  # noqa: E402
from common.systems.own_folder import write_project  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402
from common.systems.weights import Weights  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402
from common.training.opened_checkpoint import Checkpoint  # noqa: E402
from tests.common.systems.tiny_weights import as_weights, random_arrays, refused  # noqa: E402
from tests.reference import hugging_face_model  # noqa: E402
from tools.convert_weight import main  # noqa: E402

MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_heads=4, seq_length=9, vocab_size=101, ffn_hidden_size=96,
    max_positions=9,
    embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, initializer_range=0.3,
)  # fmt: skip
SIZES = {
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": 9,
    "vocab_size": 101,
    "n_inner": 96,
    "initializer_range": 0.3,
}
LARGE = {
    "num_layers": 2, "hidden_size": 640, "num_heads": 10, "ffn_hidden_size": 2560,
    "vocab_size": 5003, "max_positions": 1024,
}  # fmt: skip
QUIET: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
REASON = "no framework here runs the mindformers format"
IDS = torch.arange(18).reshape(2, 9) * 5


def ours_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.array(values))
        for name, values in Checkpoint(folder).weights(MODEL)
    }


def theirs(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **QUIET, **more)).eval()


def run(source: Path, target: Path, to: str, **more: Any) -> Path:
    options = {"source_format": None, "dtype": None, "verify": True} | more
    convert(source, target, target_format=to, **options)
    return target


def save(model: Any, folder: Path, form: str) -> Path:
    """Checkpoint folder as a present or an old transformers writes it."""
    if form == "safetensors":
        model.save_pretrained(folder)
    elif form == "shards":
        model.save_pretrained(folder, max_shard_size="10KB")
        assert (folder / "model.safetensors.index.json").is_file()
    else:
        folder.mkdir()
        model.config.save_pretrained(folder)
        state = model.state_dict()
        if form == "old bin":  # as the files of 2019: no prefix, masks, no head
            state = {
                name.removeprefix("transformer."): tensor
                for name, tensor in state.items()
                if name != "lm_head.weight"
            }
            state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 9, 9) for layer in range(2)}
        torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "old bin"])
def test_a_model_of_transformers_gives_the_same_logits_here(tmp_path: Path, form: str) -> None:
    model = theirs()
    source = save(model, tmp_path / "hf", form)
    assert detect(source) == "hf"
    ours = run(source, tmp_path / "ours", "torch_gpt2")
    with torch.no_grad():
        np.testing.assert_array_equal(
            hugging_face_model(MODEL, ours_of(ours))(IDS).logits, model(IDS).logits
        )


def test_transformers_opens_what_comes_back(tmp_path: Path) -> None:
    model = theirs()
    source = save(model, tmp_path / "hf", "safetensors")
    (source / "merges.txt").write_text("#version: 0.2\n")
    through = run(run(source, tmp_path / "ours", "mindspore"), tmp_path / "mf", "mindformers")
    found = transformers.GPT2LMHeadModel.from_pretrained(
        run(through, tmp_path / "again", "hf")
    ).eval()
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, model(IDS).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(found.generate(IDS[:, :5], **options), model.generate(IDS[:, :5], **options))
    assert (run(source, tmp_path / "direct", "hf") / "merges.txt").is_file(), (
        "the tokenizer goes along"
    )
    kept = {
        "n_layer",
        "n_embd",
        "n_head",
        "n_positions",
        "vocab_size",
        "layer_norm_epsilon",
        "initializer_range",
    }
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "again")
    ]
    assert {name: configs[0][name] for name in kept} == {name: configs[1][name] for name in kept}


def test_the_command_line_of_mindformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = theirs()
    file = save(model, tmp_path / "hf", "bin") / "pytorch_model.bin"
    target = tmp_path / "gpt2.ckpt"
    words = ["--torch_path", str(file), "--mindspore_path", str(target)]
    assert main(["--layers", "2", *words]) == 0
    with open_tensors(target) as found:
        assert len(found) == 16 * 2 + 4
        query = found["backbone.blocks.1.attention.dense1.weight"].read()
    state = model.state_dict()
    np.testing.assert_array_equal(query, state["transformer.h.1.attn.c_attn.weight"][:, :24].T)
    for layers, fault in (
        (["--layers", "1"], "has 2 blocks, and --layers says 1; say --layers 2"),
        (["--layers", "24"], "--layers says 24; say --layers 2"),
        ([], "--layers says 12; say --layers 2"),  # MindFormers' default
    ):
        before = target.read_bytes()
        assert main([*layers, *words]) == CheckpointError.exit_code
        assert fault in capsys.readouterr().err and target.read_bytes() == before


def random_weights(model: ModelConfig, dtype: str, seed: int) -> Weights:
    arrays = random_arrays(model, seed)
    if dtype == "bfloat16":
        words = np.random.default_rng(seed)  # of finite numbers
        arrays = {
            name: words.integers(0, 0x7F80, array.shape, np.uint16)
            for name, array in arrays.items()
        }
    elif dtype == "float16":
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    return as_weights(model, arrays, dtype)


FORMATS_OF_ANY_TYPE = ["hf", "mindformers", "mindformers_r0.3"]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelConfig, list[tuple[str, int, int]]]:
    """An odd model, and formats with the tensor and pipeline ranks that divide it."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    model = ModelConfig(
        num_layers=layers, hidden_size=heads * draw(st.integers(1, 5)), num_heads=heads,
        seq_length=1,
        max_positions=draw(st.integers(1, 9)), vocab_size=draw(st.integers(1, 40)),
        ffn_hidden_size=draw(st.sampled_from([1, 5, 7, 12, 24])),
        vocab_multiple=draw(st.sampled_from([1, 8, 128])),
        embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    tensors = [
        ranks
        for ranks in range(1, 5)
        if not heads % ranks and not (model.ffn_hidden_size or 0) % ranks
    ]
    stages = [ranks for ranks in range(1, 5) if not layers % ranks]
    way = []
    for name in draw(
        st.lists(
            st.sampled_from([*FORMATS_OF_ANY_TYPE, "megatron", "megatron_core"]),
            min_size=2,
            max_size=4,
        )
    ):
        sharded = FORMATS[name].write_shards is not None
        way.append(
            (
                name,
                draw(st.sampled_from(tensors)) if sharded else 1,
                draw(st.sampled_from(stages)) if sharded else 1,
            )
        )
    return model, way


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layout=layouts(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_there_and_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[ModelConfig, list[tuple[str, int, int]]],
    dtype: str,
    seed: int,
) -> None:
    model, way = layout
    if dtype == "float32":  # the only type of our own folders
        way = [*way[:1], ("torch_gpt2", 1, 1), *way[1:]]
    folder = tmp_path_factory.mktemp("way")
    weights = random_weights(model, dtype, seed)
    (folder / "0").mkdir()
    FORMATS[way[0][0]].write(folder / "0", weights, None)
    for number, ((one, *_), (other, tensor, stages)) in enumerate(itertools.pairwise(way), 1):
        source, target = folder / str(number - 1), folder / str(number)
        run(source, target, other, source_format=one, model_parallel=tensor, pipeline_stage=stages)
    with FORMATS[way[-1][0]].open(folder / str(len(way) - 1)) as found:
        assert found.tensors.keys() == weights.tensors.keys()
        assert (
            found.model.num_heads == model.num_heads and found.model.vocab_size == model.vocab_size
        )
        for name, tensor in found.tensors.items():
            assert tensor.dtype == dtype
            np.testing.assert_array_equal(tensor.load(), weights.tensors[name].load(), err_msg=name)


def test_types_are_rounded_as_torch_does(tmp_path: Path) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")
    for dtype in ("bfloat16", "float16"):
        found = transformers.GPT2LMHeadModel.from_pretrained(
            run(source, tmp_path / dtype, "hf", dtype=dtype)
        )
        expected = theirs().to(getattr(torch, dtype)).state_dict()
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items()
        )


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def with_config(**changes: Any) -> Callable[[Path, Any], None]:
    """Return a function that changes the config.json of a folder."""

    def spoil(folder: Path, model: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


def with_bin(content: Callable[[Any], Any]) -> Callable[[Path, Any], None]:
    """Return a function that puts a pytorch_model.bin in place of the weights."""

    def spoil(folder: Path, model: Any) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content(model), folder / "pytorch_model.bin")

    return spoil


def scaled(dtype: Any) -> Callable[[Any], Any]:
    return lambda model: {
        name: (tensor * 1e6).to(dtype) for name, tensor in model.transformer.state_dict().items()
    }


BAD: dict[str, tuple[Callable[[Path, Any], object], list[str]]] = {
    # message: what is done to a folder of transformers, more words of the command
    r"source: no weights of a known format here; say --from":
        (lambda folder, _: (folder / "model.safetensors").unlink(), []),
    r"source/model.safetensors: not a whole safetensors file":
        (lambda folder, _: os.truncate(folder / "model.safetensors", 9000), []),
    r"source/pytorch_model.bin: its pickle names posix.system":
        (with_bin(lambda _: {"transformer.wte.weight": Evil()}), []),
    r"missing transformer.h.2.ln_1.weight \[24\]": (with_config(n_layer=3), []),
    r"transformer.wte.weight is \[101, 24\], the model's is \[101, 12\]":
        (with_config(n_embd=12), []),
    r"activation_function='relu'; our model": (with_config(activation_function="relu"), []),
    r"num_heads='four' of the model: Input should be a valid integer":
        (with_config(n_head="four"), []),
    r"5 heads do not divide a width of 24": (with_config(n_head=5), []),
    r"1000000000 blocks; expected 10000 at most": (with_config(n_layer=10**9), []),
    r"no config of a GPT-2: n_layer, n_embd, n_head, vocab_size, n_positions missing":
        (lambda folder, _: (folder / "config.json").write_text("{}"), []),
    r"lm_head.weight differs from the embedding":
        (with_bin(lambda model: model.state_dict() | {"lm_head.weight": torch.ones(101, 24)}), []),
    r"are int8, as a quantized model's": (with_bin(scaled(torch.int8)), []),
    r"weight of .* would be infinite": (with_bin(scaled(None)), ["--dtype", "float16"]),
    r"our own folders hold float32, or int8": (lambda *_: None, ["--dtype", "float16", "--to",
        "torch_gpt2"]),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (spoil, words), model = BAD[message], theirs()
    spoil(source := save(model, tmp_path / "source", "safetensors"), model)
    refused(capsys, source, message, *words, to="mindformers")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goood", r"goood: does not exist in {0}; did you mean good\?$"),
        ("gpt2", "gpt2: does not exist in {0}; give a path, or hf://OWNER/NAME for a model of"),
        ("a/b.bin", "a/b.bin: does not exist, nor does the folder {0}/a;"),
        ("good/typo.safetensors", "good/typo.safetensors: does not exist in .*model.safetensors"),
    ],
)
def test_a_path_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(theirs(), tmp_path / "good", "safetensors")
    for format in (None, "hf"):
        with pytest.raises(ConfigError, match=message.format(tmp_path)):
            run(Path(name), tmp_path / "out", "mindformers", source_format=format)
    with pytest.raises(ConfigError, match=message.format(tmp_path)):
        convert_as_mindformers_did(2, Path(name), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_full_disk_and_a_folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(theirs(), tmp_path / "good", "safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(good, tmp_path / "out", "hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(
        "common.systems.run_state.dump_yaml", lambda *_, **__: (_ for _ in ()).throw(full)
    )
    message = "other: the weights could not be written: .*No space left on device"
    with pytest.raises(StorageError, match=message):
        run(good, tmp_path / "other", "mindformers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "out"]


def test_values_that_are_not_numbers_travel_bit_for_bit(tmp_path: Path) -> None:
    model = theirs()
    words = model.transformer.wte.weight.data.view(torch.int32)
    # NaNs, -infinity, -0
    words[0, :4] = torch.tensor([0x7FC12345, 0x7F800001, -8388608, -(2**31)], dtype=torch.int32)
    folder = save(model, tmp_path / "source", "bin")  # with lm_head
    for target in ("torch_gpt2", "mindformers", "hf"):
        folder = run(folder, tmp_path / target, target)
    with open_tensors(folder / "model.safetensors") as found:
        assert found["transformer.wte.weight"].read().tobytes() == words.numpy().tobytes()


@pytest.mark.parametrize("to", ["torch_gpt2", "mindformers", "megatron", "megatron_core"])
def test_tensors_go_from_the_mapped_file_to_the_disk_without_a_copy_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Memory is less than any matrix needs, transposed, cut or fused, and the table of tokens."""
    model = resolve_model(MODEL.model_copy(update=LARGE))
    given = random_arrays(model)
    (tmp_path / "hf").mkdir()
    write_hugging_face(tmp_path / "hf", as_weights(model, given), None)
    written, pwrite = [], os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        written.append(pwrite(descriptor, data, offset))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", counted)
    ranks = {"model_parallel": 2, "pipeline_stage": 2} if "megatron" in to else {}
    convert(tmp_path / "hf", tmp_path / "warm", target_format=to, **ranks)
    written.clear()
    tracemalloc.start()
    try:
        convert(tmp_path / "hf", tmp_path / "out", target_format=to, **ranks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    least = min(array.nbytes for array in given.values() if array.ndim == 2)
    assert peak < least // 2
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    sizes = [size for size in sizes if size > 2**20]  # without YAML and JSON
    assert len(sizes) == 4 ** bool(ranks)
    assert sum(written) == sum(sizes)
    if max(written) == 2**21:  # a file system without direct writes takes smaller pieces
        assert written.count(2**21) == sum(size // 2**21 for size in sizes)
    monkeypatch.undo()
    with FORMATS[to].open(tmp_path / "out") as found:
        for name, weight in found.tensors.items():
            np.testing.assert_array_equal(weight.load(), given[name])


def test_places_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")
    for name in ("dangling", "link"):
        (tmp_path / name).symlink_to(tmp_path / f"{name} 目标")
    (tmp_path / "link 目标").mkdir()
    for name in ("dangling", "link"):
        run(source, tmp_path / name, "mindformers")
        assert (tmp_path / name).is_symlink() and (
            tmp_path / f"{name} 目标" / "gpt2.ckpt"
        ).is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(
        ConfigError, match="is the current folder, which would be replaced; give the name of one"
    ):
        run(source, Path(), "hf")
    with pytest.raises(
        ConfigError,
        match=r"model.safetensors is both an input and an output.*another --mindspore_path",
    ):
        convert_as_mindformers_did(2, source / "model.safetensors", source / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dangling",
        "dangling 目标",
        "here",
        "hf",
        "link",
        "link 目标",
    ]


def test_a_scheduler_that_stops_it_finds_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--input", str(source), "--output", str(tmp_path / "out"), "--to", "mindformers"],
    )
    monkeypatch.setattr(
        "common.systems.mindformers.write.write_file",
        lambda *_: os.kill(os.getpid(), signal.SIGTERM),
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stopped:
            monkeypatch.syspath_prepend("tools")  # as Python does for a script
            runpy.run_path("tools/convert_weight.py", run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143 and [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_verify_finds_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")

    def flipped(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
        sums = write_project(folder, weights, dtype)
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["model.safetensors"]["crc32"] = zlib.crc32(data)
        write_manifest(folder, manifest)
        return sums

    monkeypatch.setitem(
        FORMATS,
        "torch_gpt2",
        type(FORMATS["torch_gpt2"])(**(vars(FORMATS["torch_gpt2"]) | {"write": flipped})),
    )
    with pytest.raises(CheckpointError, match=r"read back, ln_f.bias differs"):
        run(source, tmp_path / "ours", "torch_gpt2")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("to", "file"),
    [("torch_gpt2", "manifest.json"), ("hf", "config.json"), ("mindformers", "model.yaml")],
)
def test_the_converter_opens_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, file: str
) -> None:
    """Also without --verify: what cannot be opened is not left there."""
    source, format = save(theirs(), tmp_path / "hf", "safetensors"), FORMATS[to]

    def damaged(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
        sums = format.write(folder, weights, dtype)  # type: ignore[misc]
        (folder / file).write_text("{}")
        return sums

    monkeypatch.setitem(FORMATS, to, dataclasses.replace(format, write=damaged))
    message = rf"hf: what was made of it cannot be read back: {file}: .*fix or remove it there"
    with pytest.raises(CheckpointError, match=message):
        run(source, tmp_path / "out", to, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_verify_computes_the_logits_of_both_sides(
    tmp_path: Path, mindspore: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' against those of either backend; where nothing runs a format, that is said."""
    source = save(theirs(), tmp_path / "hf", "safetensors")
    for target in ("torch_gpt2", "mindspore", "mindformers"):
        words = ["--input", str(source), "--output", str(tmp_path / target), "--to", target]
        assert main([*words, "--verify"]) == 0
        told = capsys.readouterr().out
        logits = json.loads((tmp_path / target / "conversion.json").read_text())["logits"]
        if target == "mindformers":
            assert logits == {"compared": False, "reason": REASON} and REASON in told
        else:
            assert (
                0 < logits["largest_difference"] < 1e-5 * logits["largest_logit"]
                and "logits: largest difference" in told
            )
    assert {"torch_gpt2.predict", "mindformers_gpt2.predict"} <= sys.modules.keys()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "transformers" else find(name, *more),
    )
    words = ["--input", str(source), "--output", str(tmp_path / "ours"), "--to", "torch_gpt2"]
    assert main([*words, "--verify"]) == 0
    reason = json.loads((tmp_path / "ours" / "conversion.json").read_text())["logits"]["reason"]
    assert reason == "transformers, which computes the logits of hf, is not installed"


@pytest.mark.parametrize(
    ("width", "heads", "said"),
    [
        (192, 6, None), (192, 3, None), (192, 8, "8 heads, where a GPT-2 of width 192 has 12 or 6"
            " or 3;"), (768, 12, None),
        (768, 16, "has 12;"), (512, 32, "has 8 or 4;"),
        (10, 2, None), (128, 1, "has 8 or 4 or 2;"), (5120, 40, None),
    ],
)  # fmt: skip
def test_unusual_heads_are_said_at_any_width(
    monkeypatch: pytest.MonkeyPatch, width: int, heads: int, said: str | None
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "common.conversion.convert.LOG", types.SimpleNamespace(warning=lines.append)
    )
    warn_of_heads(Path("x"), MODEL.model_copy(update={"hidden_size": width, "num_heads": heads}))
    assert len(lines) == (said is not None) and (said or "") in "".join(lines)


def test_logits_that_differ_are_an_error(tmp_path: Path) -> None:
    source = save(theirs(), tmp_path / "hf", "safetensors")
    for wrong in (1.001, np.nan):
        runners = {
            "hf": lambda folder, model, ids: np.ones((2, 9, 101)),
            "torch_gpt2": lambda *_, wrong=wrong: np.full((2, 9, 101), wrong),
        }
        with pytest.raises(CheckpointError, match=r"its logits .torch_gpt2. differ by"):
            convert(
                source, tmp_path / "ours", target_format="torch_gpt2", verify=True, runners=runners
            )
        assert not (tmp_path / "ours").exists()
    with pytest.raises(
        CheckpointError,
        match="its framework for hf could not run it: 3; convert without --verify, or fix",
    ):
        convert(
            source,
            tmp_path / "ours",
            target_format="torch_gpt2",
            verify=True,
            runners=runners | {"hf": lambda *_: {}[3]},
        )
    alone = convert(
        source / "model.safetensors",
        tmp_path / "ours",
        source_format="hf",
        target_format="torch_gpt2",
        verify=True,
        runners=runners,
    )
    assert alone.logits is not None and "prefer another file" in alone.logits["reason"]


def test_the_command_line_of_mindformers_takes_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "2", "--torch_path", "a", "--mindspore_path", "b"]
    for more in (["--verify"], ["--dtype", "float16"], ["--to", "hf"], ["--model_parallel", "2"]):
        assert main([*words, *more]) == 2
        assert "go together, and with nothing else" in capsys.readouterr().err


def test_convert_as_mindformers_did_needs_a_place(tmp_path: Path) -> None:
    file = save(theirs(), tmp_path / "hf", "bin") / "pytorch_model.bin"
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="taken: could not be written: Is a directory"):
        convert_as_mindformers_did(2, file, tmp_path / "taken")
    assert not list(tmp_path.glob(".*")), "nothing is left"
    torch.save({"wte.weight": torch.zeros(0, 4)}, tmp_path / "empty.bin")
    with pytest.raises(ConfigError, match="vocab_size=0 of the model"):
        convert_as_mindformers_did(2, tmp_path / "empty.bin", tmp_path / "x.ckpt")
    with pytest.raises(StorageError, match="could not be written: No such file"):
        convert_as_mindformers_did(2, file, tmp_path / "nowhere" / "gpt2.ckpt")
