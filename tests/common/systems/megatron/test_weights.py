"""Megatron's checkpoints: against its formulas written out by hand, and megatron-core's own model,
optimizer and parameter groups.
"""

import argparse
import contextlib
import functools
import io
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from common.config.schema import ModelConfig  # noqa: E402
from common.conversion.convert import convert  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from common.systems.megatron.write import write_megatron  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402
from tests.common.systems.tiny_weights import as_weights, random_arrays, refused, require_arrays, resave  # noqa: E402
from tests.reference import hugging_face_model  # noqa: E402
from tools.convert_weight import main  # noqa: E402

SIZES = {"num_layers": 4, "hidden_size": 24, "ffn_hidden_size": 96, "seq_length": 9}
MODEL = ModelConfig(
    **SIZES, num_heads=4, vocab_size=101, max_positions=9, vocab_multiple=8,
    embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
ARGS = SIZES | {
    "num_attention_heads": 4, "max_position_embeddings": 9, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "make_vocab_size_divisible_by": 8, "layernorm_epsilon": 1e-5,
}  # fmt: skip
HEAD = 6
FILE = "model_optim_rng.pt"


def load(file: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, weights_only=True)


def fused_by_hand(parts: list[Any], heads: range, version: int) -> Any:
    """A tensor rank's rows of query, key and value, as comments in Megatron's
    ``_transpose_first_dim`` describe the versions.
    """
    places = {
        0: [(part, head, output) for part in range(3) for head in heads for output in range(HEAD)],
        1: [(part, head, output) for head in heads for output in range(HEAD) for part in range(3)],
        2: [(part, head, output) for head in heads for part in range(3) for output in range(HEAD)],
    }[version]
    return np.stack([parts[part][head * HEAD + output] for part, head, output in places])


def rank_by_hand(arrays: dict[str, Any], rank: int, version: int) -> dict[str, Any]:
    """The layers of one of two tensor ranks as Megatron-LM had them at first."""
    heads = range(rank * 2, rank * 2 + 2)
    half, inner = slice(rank * 12, rank * 12 + 12), slice(rank * 48, rank * 48 + 48)
    whole = slice(None)
    parts = {
        "input_layernorm": ("ln_1", whole, whole),
        "attention.dense": ("attn.c_proj", (whole, half), whole),
        "post_attention_layernorm": ("ln_2", whole, whole),
        "mlp.dense_h_to_4h": ("mlp.c_fc", inner, inner),
        "mlp.dense_4h_to_h": ("mlp.c_proj", (whole, inner), whole),
    }
    found = {f"final_layernorm.{kind}": arrays[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for layer in range(4):
        for number, kind in enumerate(("weight", "bias")):
            fused = [arrays[f"h.{layer}.attn.{part}_proj.{kind}"] for part in "qkv"]
            name = f"layers.{layer}.attention.query_key_value.{kind}"
            found[name] = fused_by_hand(fused, heads, version)
            for theirs, (ours, *places) in parts.items():
                array = arrays[f"h.{layer}.{ours}.{kind}"]
                found[f"layers.{layer}.{theirs}.{kind}"] = array[places[number]]
    return found


def tensors(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tree.items()}


@pytest.mark.parametrize("version", [0, 1, 2])
def test_old_files_are_read_in_the_order_of_their_version(tmp_path: Path, version: int) -> None:
    arrays, table = random_arrays(MODEL), np.zeros((112, 24), np.float32)
    table[:101] = arrays["wte.weight"]
    args = argparse.Namespace(**ARGS, model_parallel_size=2, padded_vocab_size=112)
    for rank in range(2):
        embedding = {
            "word_embeddings": tensors({"weight": table[rank * 56 : rank * 56 + 56]}),
            "position_embeddings": tensors({"weight": arrays["wpe.weight"]}),
        }
        layers = tensors(rank_by_hand(arrays, rank, version))
        model = {"language_model": {"embedding": embedding, "transformer": layers}}
        saved = {"args": args, "iteration": 7, "model": model}
        if version:  # the first had none
            saved["checkpoint_version"] = float(version)
        folder = tmp_path / "iter_0000007" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        torch.save(saved, folder / FILE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert detect(tmp_path) == detect(tmp_path / "iter_0000007") == "megatron"
    found = require_arrays(tmp_path, "megatron", {**arrays, "wte.weight": table})
    assert found.model.vocab_size == 112
    assert "all 112 rows are kept" in found.ignored["padded_vocab_size"]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": MODEL.model_dump()}))
    found = require_arrays(tmp_path / "iter_0000007", "megatron", arrays)
    assert "rows that pad the vocabulary" in found.ignored.values()


def test_each_rank_has_its_own_heads_layers_and_tokens(good: Path) -> None:
    """Written tensors as torch sees them, by the same formulas."""
    arrays = random_arrays(MODEL)
    assert (good / "latest_checkpointed_iteration.txt").read_text() == "release"
    for rank, stage in np.ndindex(2, 2):
        saved = load(good / "release" / f"mp_rank_{rank:02d}_{stage:03d}" / FILE)
        args, model = saved["args"], saved["model"]
        assert (saved["checkpoint_version"], args.padded_vocab_size, args.vocab_size) == (3, 112, 101)
        encoder = dict(model["language_model"]["encoder"])
        first = model if stage else model["language_model"]["embedding"]
        table = first["word_embeddings_for_head" if stage else "word_embeddings"]["weight"]
        np.testing.assert_array_equal(table, np.pad(arrays["wte.weight"], ((0, 11), (0, 0)))[rank * 56 :][:56])
        assert len(encoder) == 2 * 12 + 2 * stage
        expected = rank_by_hand(arrays, rank, 2)
        for name, tensor in encoder.items():
            name = name.replace("self_attention", "attention")
            if name.startswith("layers."):
                _, layer, part = name.split(".", 2)
                name = f"layers.{int(layer) + 2 * stage}.{part}"
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """megatron-core's GPTModel of one rank, with its own layers and GPT-2's gelu; it computes on a
    CPU once no CUDA device is asked for.
    """
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    def build(layers: int = 4, **more: Any) -> Any:
        config = TransformerConfig(
            num_layers=layers, hidden_size=24, num_attention_heads=4, ffn_hidden_size=96,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
            activation_func=functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        )  # fmt: skip
        more |= {"vocab_size": 104, "max_sequence_length": 9}
        more |= {"share_embeddings_and_output_weights": True}
        return GPTModel(config, get_gpt_layer_local_spec(), **more)

    group = tmp_path_factory.mktemp("core") / "group"
    torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        # for dropout, of which there is none
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        parallel_state.initialize_model_parallel()
        yield build
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_megatron_core_loads_it_and_computes_the_same(tmp_path: Path, core: Any) -> None:
    arrays = {name: array * np.float32(0.3) for name, array in random_arrays(MODEL).items()}
    for stages in (1, 2):
        (folder := tmp_path / str(stages)).mkdir()
        weights = as_weights(MODEL, arrays)
        write_megatron(folder, weights, None, 1, stages, format="megatron_core")
        for stage, file in enumerate(sorted(folder.glob(f"release/*/{FILE}"))):
            ends = {"pre_process": stage == 0, "post_process": stage == stages - 1}
            model = core(4 // stages, **ends).eval()
            model.load_state_dict(load(file)["model"], strict=True)
        if stages == 1:
            ids = torch.arange(18).reshape(2, 9) * 5
            mask = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
            with torch.no_grad():
                found = model(ids, torch.arange(9).expand(2, 9), mask)[..., :101]
                expected = hugging_face_model(MODEL, tensors(arrays))(ids).logits
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert stage == 1


def groups_of(model: Any) -> list[dict[str, Any]]:
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups

    return _get_param_groups([model], OptimizerConfig(lr=0.0), None)


def half_run(form: str) -> dict[str, Any]:
    """Return a run; without scales and without its precision it is in float32."""
    state = {
        "step": 5, "consumed_samples": 20, "sample_hash": "ab", "skipped_steps": 1, "skipped_in_a_row": 0,
        "updated_samples": 24,
    }  # fmt: skip
    config: dict[str, Any] = {"optimizer": {"name": "adamw", "decay_steps": 9}}
    if form == "float32":
        return {"state": state, "engine": {"optimizer_steps": 4, "loss_scale": {"mode": "none"}, "rng": {}},
                "config": config}  # fmt: skip
    scale = {"mode": "dynamic", "value": 512.0, "finite_steps": 3, "overflows": 1}
    config["optimizer"] |= {
        "learning_rate": 1e-3, "min_learning_rate": 1e-4, "schedule": "cosine", "weight_decay": 0.1, "warmup_steps": 2,
    }  # fmt: skip
    config |= {"precision": {"compute": form}, "loss_scale": {"hysteresis": 4}, "train": {"global_batch_size": 4}}
    return {"state": state, "engine": {"optimizer_steps": 4, "loss_scale": scale, "rng": {}}, "config": config}


@pytest.mark.parametrize("form", ["float32", "float16"])
def test_its_optimizer_takes_over_the_moments(tmp_path: Path, core: Any, form: str) -> None:
    """The numbers of the parameters are megatron-core's: moments are made to be twice and three times the weights."""
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    arrays = random_arrays(MODEL)
    moments = {f"{name}.exp_avg": array * 2 for name, array in arrays.items()}
    moments |= {f"{name}.exp_avg_sq": array * 3 for name, array in arrays.items()}
    weights = as_weights(MODEL, arrays, moments=moments, run=half_run(form))
    write_megatron(tmp_path, weights, None if form == "float32" else form, format="megatron_core")
    saved = load(tmp_path / "iter_0000005" / "mp_rank_00" / FILE)
    assert saved["iteration"] == 5 and saved["args"].consumed_train_samples == 20
    assert ("opt_param_scheduler" in saved) == (form == "float16"), "the other run lacks keys of it"
    assert saved["args"].params_dtype == getattr(torch, form)
    model, inner = core(), saved["optimizer"]
    if form == "float16":
        scale, *counts = inner["grad_scaler"].values()
        assert (scale.tolist(), *counts) == ([512.0], 3, 3)
        for group, copies in zip(groups_of(model), inner["fp32_from_fp16_params"], strict=True):
            for parameter, copy in zip(group["params"], copies, strict=True):
                parameter.data.copy_(copy)  # as its Float16OptimizerWithFloat16Params does
        inner = inner["optimizer"]
        assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float16}
    else:
        model.load_state_dict(saved["model"])
    optimizer = object.__new__(FP32Optimizer)  # to make one takes a CUDA device
    optimizer.optimizer, optimizer.is_stub_optimizer = torch.optim.AdamW(groups_of(model)), False
    # torch's AdamW has one for each, which this gives it
    inner["state"]["common_step"] = inner["param_groups"][0]["step"]
    optimizer.load_state_dict(inner)
    assert len(optimizer.optimizer.state) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        state, near = optimizer.optimizer.state[parameter], torch.testing.assert_close
        assert state["step"] == 4
        near(state["exp_avg"], 2 * parameter.data, rtol=0, atol=0, msg=name)
        near(state["exp_avg_sq"], 3 * parameter.data, rtol=1e-6, atol=0, msg=name)
    if form == "float16":  # its rate goes on: 24 samples of 36, of which 8 are the warm-up
        rates = OptimizerParamScheduler(
            optimizer.optimizer, 0.0, 1.0, 0.0, 1, 2, "linear", 0.0, 0.0, 0, "constant",
            use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=False,
        )  # fmt: skip
        rates.load_state_dict(saved["opt_param_scheduler"])
        expected = 1e-4 + 9e-4 * (1 + np.cos(np.pi * 16 / 28)) / 2
        assert optimizer.optimizer.param_groups[-1]["lr"] == pytest.approx(expected)
    found = require_arrays(tmp_path, "megatron_core", arrays)
    assert found.run == half_run(form) and found.tensors["ln_f.bias"].dtype == "float32"


def test_a_run_of_megatron_core_resumes(tmp_path: Path, core: Any) -> None:
    """Trained and saved by its model and torch's AdamW in half precision; no model.yaml."""
    model, random = core(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random)
    groups = [
        group | {"params": [parameter.detach().clone() for parameter in group["params"]]} for group in groups_of(model)
    ]
    copies = [group["params"] for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
    for _ in range(2):
        for copy in (copy for group in copies for copy in group):
            copy.grad = 3 * copy
        optimizer.step()
    scaler = {"scale": torch.tensor([64.0]), "growth_tracker": 7, "hysteresis_tracker": 1}
    args = argparse.Namespace(
        **ARGS, vocab_size=None, padded_vocab_size=104, consumed_train_samples=16,
        params_dtype=torch.float16, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    )  # fmt: skip
    saved = {
        "args": args, "checkpoint_version": 3.0, "iteration": 2,
        "optimizer": {
            "optimizer": optimizer.state_dict(), "fp32_from_fp16_params": copies,
            "grad_scaler": scaler,
        },
        "opt_param_scheduler": {"num_steps": 12},  # a step of 4 was skipped
        "model": model.half().state_dict(),
    }  # fmt: skip
    folder = tmp_path / "in" / "iter_0000002" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(saved, folder / FILE)
    (tmp_path / "in" / "latest_checkpointed_iteration.txt").write_text("2\n")
    result = convert(tmp_path / "in", tmp_path / "out", target_format="torch_gpt2", verify=True)
    assert (result["from"], result["step"]) == ("megatron_core", 2)
    found = FORMATS["torch_gpt2"].open(tmp_path / "out")
    assert found.run is not None
    state, engine = found.run["state"], found.run["engine"]
    assert (state["consumed_samples"], state["updated_samples"]) == (16, 12)
    scale = {"mode": "dynamic", "value": 64.0, "finite_steps": 7, "overflows": 1}
    assert (engine["optimizer_steps"], engine["loss_scale"]) == (2, scale)
    np.testing.assert_array_equal(found.tensors["wte.weight"].load(), copies[0][0])
    for name, weight in found.tensors.items():
        values, near = weight.load().astype(np.float64), np.testing.assert_allclose
        averages, squares = 3 * (1 - 0.9**2) * values, 9 * (1 - 0.999**2) * values**2
        near(found.moments[f"{name}.exp_avg"].load(), averages, rtol=1e-5, err_msg=name)
        near(found.moments[f"{name}.exp_avg_sq"].load(), squares, rtol=1e-4, err_msg=name)
    resave(folder / FILE, lambda saved: saved["optimizer"].update(grad_scaler=[1]))
    message = f"{FILE}: its counters or its loss scale are not numbers"
    with pytest.raises(ConfigError, match=message):
        FORMATS["megatron_core"].open(tmp_path / "in")


def test_transformer_engine_holds_the_norms_and_its_scales(tmp_path: Path) -> None:
    """And a folder whose pipeline stages are of unlike size, as --decoder-first-pipeline-num-layers makes them."""
    arrays = random_arrays(MODEL)
    write_megatron(tmp_path, as_weights(MODEL, arrays), None, 1, 4, format="megatron_core")
    first, second, *others = sorted(tmp_path.glob(f"release/*/{FILE}"))
    saved = {first: load(first), second: load(second)}
    for number, file in enumerate(others, 1):  # all but the first layer on the second stage
        saved[second]["model"] |= {
            name.replace("layers.0.", f"layers.{number}."): tensor for name, tensor in load(file)["model"].items()
        }
        shutil.rmtree(file.parent)
    for file, content in saved.items():
        model = {
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
                "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
            ): tensor
            for name, tensor in content["model"].items()
        }
        state = torch.zeros(3) if file == first else io.BytesIO(b"")
        content["model"] = model | {"decoder.layers.0.mlp.linear_fc1._extra_state": state}
        content["args"].pipeline_model_parallel_size = 2
        torch.save(content, file)
    assert detect(tmp_path) == "megatron_core"
    require_arrays(tmp_path, "megatron_core", arrays)


def test_state_of_the_distributed_optimizer_elsewhere_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, as_weights(MODEL, random_arrays(MODEL)), None)
    file = tmp_path / "release" / "mp_rank_00" / FILE
    optimizer = {"optimizer": {"param_groups": [{"params": [0]}]}, "grad_scaler": {}}
    resave(file, lambda saved: saved.update(optimizer=optimizer, iteration=9))
    found = require_arrays(tmp_path, "megatron", random_arrays(MODEL))
    assert "by the distributed optimizer" in found.ignored["optimizer"]


CHANGES: dict[str, dict[str, Any]] = {
    "vocab_size": {},
    "tokenizer_type": {"vocab_size": None},
    "the exact gelu": {"bias_gelu_fusion": False},
    "transformers' converter": {"orig_vocab_size": 50257}
    | dict.fromkeys(("vocab_size", "layernorm_epsilon", "hidden_dropout", "seq_length")),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_vocabulary_without_a_model_yaml(tmp_path: Path, kind: str) -> None:
    """From args: said outright, or GPT-2's 50257 by the tokenizer where the padding fits."""
    sizes = {"hidden_size": 4, "num_layers": 1, "ffn_hidden_size": 4}
    model = MODEL.model_copy(update=sizes | {"vocab_size": 50257, "vocab_multiple": 128})
    halves = {name: array.astype(np.float16) for name, array in random_arrays(model).items()}
    write_megatron(tmp_path, as_weights(model, halves, "float16"), None, 2)
    (tmp_path / "model.yaml").unlink()
    for file in tmp_path.glob(f"release/*/{FILE}"):
        saved = load(file)
        vars(saved["args"]).update(CHANGES[kind])
        if "converter" in kind:
            saved["args"] = types.SimpleNamespace(**vars(saved["args"]))
            embedding = saved["model"]["language_model"]["embedding"]
            saved["model"]["word_embeddings_for_head"] = embedding["word_embeddings"]
            saved["optimizer"] = {"step": 0, "param_groups": [{"lr": 0.0, "params": []}]}
            saved["rng_state"] = [{"extra": io.BytesIO(b"as Transformer Engine's scales")}]
        torch.save(saved, file)
    found = FORMATS["megatron"].open(tmp_path)
    read = {"seq_length": 9, "activation": "gelu" if "gelu" in kind else "gelu_new"}
    assert found.model.model_dump() == model.model_copy(update=read).model_dump()
    assert found.run is None and "optimizer" not in found.ignored


def changed(edit: Callable[[Any], Any], files: str = f"mp_rank_*/{FILE}") -> Callable[[Path], None]:
    """Return a function that edits what the files of ranks hold."""

    def spoil(folder: Path) -> None:
        for file in folder.glob(f"release/{files}"):
            resave(file, edit)

    return spoil


def with_args(**args: Any) -> Callable[[Path], None]:
    """Return a function that changes the args of all ranks, and takes our model.yaml away."""

    def spoil(folder: Path) -> None:
        changed(lambda saved: vars(saved["args"]).update(args))(folder)
        (folder / "model.yaml").unlink()

    return spoil


def of_encoder(saved: Any) -> Any:
    return saved["model"]["language_model"]["encoder"]


SECOND, LAST = f"mp_rank_01_000/{FILE}", f"mp_rank_00_001/{FILE}"
BAD: dict[str, Callable[[Path], object]] = {
    "bad/release: missing mp_rank_01_001; copy the whole folder again":
        lambda folder: shutil.rmtree(folder / "release" / "mp_rank_01_001"),
    "tensor ranks differ in language_model.encoder.layers.1.input_layernorm.bias":
        changed(lambda saved: of_encoder(saved)["layers.1.input_layernorm.bias"].add_(1), SECOND),
    "word_embeddings_for_head.weight differs from the embedding":
        changed(lambda saved: saved["model"]["word_embeddings_for_head"]["weight"].add_(1), LAST),
    f"{LAST}: iteration in the file is 7, and mp_rank_00_000 says 0":
        changed(lambda saved: saved.update(iteration=7), LAST),
    "unexpected language_model.encoder.layers.100000001.x": changed(
        lambda saved: of_encoder(saved).update({"layers.99999999.x": torch.zeros(24)}),
        f"mp_rank_*_001/{FILE}"),
    "num_heads is 4, and .* says num_attention_heads=2; fix the first":
        changed(lambda saved: vars(saved["args"]).update(num_attention_heads=2)),
    "activation is gelu_new, and .* says bias_gelu_fusion=False, which is gelu; fix the first":
        changed(lambda saved: vars(saved["args"]).update(bias_gelu_fusion=False)),
    "apply_layernorm_1p=True; our model is GPT-2, which has apply_layernorm_1p=False":
        with_args(apply_layernorm_1p=True),
    "its args lack hidden_size; put the section model": with_args(hidden_size=None),
    "training had 2 tensor x 1000000000000 pipeline ranks; copy": with_args(pipeline_model_parallel_size=10**12),
    "names 'iter_0000040', and no such folder is beside it":
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("40"),
    "Megatron's format torch_dist.*--ckpt-format torch":
        lambda folder: [shutil.rmtree(rank) for rank in folder.glob("release/*")]
        and (folder / "release" / ".metadata").touch(),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_megatron(folder, as_weights(MODEL, random_arrays(MODEL)), None, 2, 2)
    return folder


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_error(good: Path, tmp_path: Path, capsys: Any, message: str) -> None:
    shutil.copytree(good, tmp_path / "bad")
    BAD[message](tmp_path / "bad")
    refused(capsys, tmp_path / "bad", message)


def test_an_activation_without_a_name_there_is_refused(tmp_path: Path) -> None:
    quick = as_weights(MODEL.model_copy(update={"activation": "quick_gelu"}), random_arrays(MODEL))
    with pytest.raises(ConfigError, match=r"model\.activation=quick_gelu: Megatron has no name for it"):
        write_megatron(tmp_path, quick, None)
    assert [*tmp_path.iterdir()] == []


def test_ranks_of_the_target(good: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(good, source := tmp_path / "source")
    for rank, message in (
        ("--model_parallel=3", "--model_parallel=3 does not divide model.num_heads=4; choose 1, 2"),
        ("--pipeline_stage=3", "--pipeline_stage=3 does not divide model.num_layers=4"),
        ("--model_parallel=0", "give numbers of ranks, 1 or more"),
    ):
        refused(capsys, source, message, rank, to="megatron")
    message = "hf is one model for any layout; leave them out .only megatron and megatron_core"
    refused(capsys, source, message, "--model_parallel=2")
    words = ["--input", str(source), "--output", str(tmp_path / "out"), "--model_parallel", "2"]
    assert main([*words, "--to", "megatron_core", "--verify"]) == 0
    ranks = sorted((tmp_path / "out" / "release").iterdir())
    assert [path.name for path in ranks] == ["mp_rank_00", "mp_rank_01"]
    require_arrays(tmp_path / "out", "megatron_core", random_arrays(MODEL))
    assert detect(ranks[1]) == "megatron_core", "a rank's folder stands for all"
