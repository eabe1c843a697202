"""PaddleFleetX's folders: a file that Paddle wrote and the logits that it computed; what is no
whole model is refused.
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.errors import CheckpointError, ConfigError  # noqa: E402
from common.systems.table import detect  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402

FIXTURE = Path(__file__).parents[2] / "tensor_files" / "data" / "fleetx"
YAML = """\
_base_: ./pretrain_gpt_base.yaml
Global: {local_batch_size: 8}
Model:
  vocab_size: 11
  hidden_size: 8
  num_layers: 1
  num_attention_heads: 2
  ffn_hidden_size:
  hidden_dropout_prob: 0.1
  attention_probs_dropout_prob: 0.2
  max_position_embeddings: 5
  type_vocab_size: 16
  initializer_range: 0.02
"""


def copy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(FIXTURE / "model.pdparams", folder)
    (folder / "pretrain_gpt.yaml").write_text(YAML)
    return folder


def to_hugging_face(source: Path, target: Path) -> Path:
    convert(source, target, source_format=None, target_format="hf", dtype=None, verify=True)
    return target


def arrays() -> dict[str, np.ndarray]:
    with open_tensors(FIXTURE / "model.pdparams") as stored:
        return {name: np.array(tensor.read()) for name, tensor in stored.items()}


def test_the_logits_are_paddles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of float32. Arrays stay in the mapped file from some size on; these are
    small.
    """
    monkeypatch.setattr("common.tensor_files.paddle_pickle._LONG", 64)
    source = copy(tmp_path / "epoch_0_step_7")
    assert detect(source) == "fleetx"
    folder = to_hugging_face(source, tmp_path / "hf")
    found = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        np.testing.assert_allclose(
            found(torch.arange(10).reshape(2, 5)).logits,
            np.load(FIXTURE / "logits.npy"),
            rtol=1e-5,
            atol=2e-6,
        )
    config = json.loads((folder / "config.json").read_text())
    assert [config[key] for key in ("n_inner", "embd_pdrop", "attn_pdrop", "resid_pdrop")] == [
        None,
        0.1,
        0.2,
        0.1,
    ]
    assert (tmp_path / "hf" / "conversion.json").is_file()


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_forms_hold_the_same(tmp_path: Path, protocol: int) -> None:
    """Pairs of a name and an array; query, key and value apart (``fuse_attn_qkv: False``); a
    bfloat16 is uint16.
    """
    expected = to_hugging_face(copy(tmp_path / "one"), tmp_path / "hf")
    state: dict[str, Any] = {
        name: (f"tensor_{number}", values) for number, (name, values) in enumerate(arrays().items())
    }
    block = "gpt.decoder.layers.0.self_attn."
    for kind in ("weight", "bias"):
        _, fused = state.pop(f"{block}qkv_proj.{kind}")
        # of 24 columns head 0 has the first twelve: q, k and v of four each
        for number, part in enumerate("qkv"):
            columns = [12 * head + 4 * number + column for head in range(2) for column in range(4)]
            state[f"{block}{part}_proj.{kind}"] = fused[..., columns]
    (copy(tmp_path / "two") / "model.pdparams").write_bytes(pickle.dumps(state, protocol))
    folder = to_hugging_face(tmp_path / "two", tmp_path / "again")
    assert (folder / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    (tmp_path / "bf.pdparams").write_bytes(
        pickle.dumps(
            {"a": np.array([[0x3F80]], np.uint16), "b": np.asfortranarray(np.eye(2, 3))}, protocol
        )
    )
    with open_tensors(tmp_path / "bf.pdparams") as stored:
        assert stored["a"].dtype == "bfloat16" and stored["a"].read() == 0x3F80
        np.testing.assert_array_equal(stored["b"].read(), np.eye(2, 3))


def test_the_folders_of_ranks(tmp_path: Path) -> None:
    """Ranks of a sharding group save all parameters; parts of tensors or of layers are refused by
    name.
    """
    epoch = tmp_path / "epoch_0_step_7"
    one = copy(epoch / "mp_00_sharding_00_pp_00")
    copy(epoch / "mp_00_sharding_01_pp_00")
    assert detect(epoch) == "fleetx"
    (one / "pretrain_gpt.yaml").rename(epoch / "pretrain_gpt.yaml")
    to_hugging_face(epoch, tmp_path / "hf")
    copy(epoch / "mp_01_sharding_00_pp_00")
    with pytest.raises(
        CheckpointError,
        match=r"in 2 parts \(mp_00_sharding_00_pp_00, mp_01_sharding_00_pp_00\), and only a whole"
        r" one",
    ):
        to_hugging_face(epoch, tmp_path / "out")
    to_hugging_face(one, tmp_path / "out")


def test_the_true_vocabulary_of_a_model_yaml_comes_first(tmp_path: Path) -> None:
    source = copy(tmp_path / "padded")
    (source / "model.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_heads: 2, seq_length: 5, vocab_size: 7}"
    )
    result = convert(
        source, tmp_path / "hf", source_format=None, target_format="hf", dtype=None, verify=True
    )
    assert result.ignored == {
        "gpt.embeddings.word_embeddings.weight[7:11]": "rows that pad the vocabulary"
    }
    with open_tensors(tmp_path / "hf" / "model.safetensors") as found:
        np.testing.assert_array_equal(
            found["transformer.wte.weight"].read(),
            arrays()["gpt.embeddings.word_embeddings.weight"][:7],
        )


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_bad_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = copy(tmp_path / "source")
    file, config = source / "model.pdparams", source / "pretrain_gpt.yaml"
    content = file.read_bytes()

    def fails(error: type[Exception], match: str, to: str = "hf") -> None:
        with pytest.raises(error, match=match):
            convert(
                source,
                tmp_path / "out",
                source_format="fleetx",
                target_format=to,
                dtype=None,
                verify=False,
            )
        assert not list(tmp_path.glob("*out*"))

    fails(ConfigError, "--to fleetx: this format is read only", to="fleetx")
    file.write_bytes(pickle.dumps({"gpt.decoder.norm.weight": np.zeros(2000), "x": Evil()}))
    fails(
        CheckpointError,
        r"model.pdparams: its pickle names posix.system, .* nothing of it was executed",
    )
    assert not (tmp_path / "executed").exists()
    for data, reason in (
        (content[:3000], "not a whole file of paddle.save"),
        (content[:-1], "not a whole file of paddle.save"),
        (pickle.dumps([1]), "it holds a list"),
        (pickle.dumps({"a": 1}), "a is no array of numbers"),
        (pickle.dumps({"a": np.array([None])}), "of no type of plain numbers"),
        (b"(Vstorage\nctorch\nByteStorage\nV9\nVcpu\nI99\ntQ.", "99 bytes at 9 are no part of it"),
        (pickle.dumps({"a": np.zeros(3)}), "holds no names of fleetx, but a"),
    ):
        file.write_bytes(data)
        fails(CheckpointError, reason)
    file.write_bytes(content)
    config.write_text(YAML.replace("num_layers: 1", "num_layers: 2"))
    fails(CheckpointError, "missing gpt.decoder.layers.1.norm1.weight")
    config.write_text(YAML.replace("  num_attention_heads: 2\n", ""))
    fails(
        ConfigError, "Model lacks num_attention_heads; give the file that the run was started with"
    )
    config.write_text("Model: [")
    fails(ConfigError, "pretrain_gpt.yaml:1:9: not valid YAML")
    config.write_text(YAML)
    shutil.copy(config, source / "other.yaml")
    fails(ConfigError, "other.yaml, pretrain_gpt.yaml have a section Model; leave one there")
    config.unlink()
    (source / "other.yaml").write_text("Optimizer: {}")
    fails(ConfigError, "no YAML with a section Model")


def test_a_byte_that_is_missing_or_too_many_is_found(tmp_path: Path) -> None:
    """A pickle has no checksum, but its frames tell their sizes."""
    path = tmp_path / "model.pdparams"
    path.write_bytes(
        pickle.dumps(
            {"a": np.arange(300, dtype=np.float32), "b": np.arange(7, dtype=np.float32)}, protocol=4
        )
    )
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        for changed in (whole[:place] + whole[place + 1 :], whole[:place] + b"\0" + whole[place:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError), open_tensors(path):
                pass
