"""The folders of GPT2-Chinese, as transformers 2.1.1 left them there: a config of other fields,
torch's old files, masks and a head.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from common.systems.hugging_face.weights import open_hugging_face, read_config  # noqa: E402
from common.systems.table import detect  # noqa: E402

SIZES = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 13317}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config).eval()


CONFIG: dict[str, Any] = SIZES | {
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "finetuning_task": None, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "n_ctx": 16,
    "num_labels": 1, "output_attentions": False, "output_hidden_states": False, "output_past": True,
    "pruned_heads": {},
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "torchscript": False,
    "use_bfloat16": False,
}  # fmt: skip


@pytest.mark.parametrize(("as_zip", "mask"), [(False, torch.float32), (True, torch.uint8)])
def test_a_folder_of_gpt2_chinese_is_read(
    tmp_path: Path, model: Any, as_zip: bool, mask: torch.dtype
) -> None:
    state = model.state_dict()
    causal = torch.tril(torch.ones(16, 16, dtype=mask)).view(1, 1, 16, 16)
    for layer in range(2):
        state[f"transformer.h.{layer}.attn.bias"] = causal
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    head, table = state["lm_head.weight"], state["transformer.wte.weight"]
    assert head.data_ptr() == table.data_ptr(), "one storage, under two names"
    source = tmp_path / "final_model"
    source.mkdir()
    torch.save(state, source / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    fields = {name: value for name, value in CONFIG.items() if as_zip or name != "n_positions"}
    (source / "config.json").write_text(json.dumps(fields))
    (source / "vocab.txt").write_text("[SEP]\n[CLS]\n[MASK]\n[PAD]\n[UNK]\n她\n", encoding="utf-8")
    assert detect(source) == "hf"
    result = convert(source, tmp_path / "hf", target_format="hf", verify=True)
    masks = ["causal mask of an old file"] * 4
    assert sorted(result["ignored"].values()) == [*masks, "tied to transformer.wte.weight"]
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ids = torch.arange(32).reshape(2, 16) * 401
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_a_checkpoint_of_lightning_is_read(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later train.py leaves it. The callbacks' classes are keys, and nothing of them runs.
    config.json may stand beside it, or the model is given.
    """
    module = ModuleType("pytorch_lightning")
    callback = type("ModelCheckpoint", (), {"__module__": module.__name__})
    module.ModelCheckpoint = callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    file = tmp_path / "epoch=0-step=99.ckpt"
    saved = {
        "epoch": 0, "global_step": 99, "pytorch-lightning_version": "1.2.6",
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "callbacks": {callback: {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"lr_lambdas": [None]}],
    }  # fmt: skip
    torch.save(saved, file)
    assert detect(file) == "hf"
    with pytest.raises(ConfigError, match=r"put config\.json beside the weights"):
        convert(file, tmp_path / "none", target_format="hf")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    convert(file, tmp_path / "hf", target_format="hf", verify=True)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    (tmp_path / "config.json").rename(tmp_path / "model_config.json")
    own = read_config(tmp_path / "model_config.json")
    with open_hugging_face(file, own) as weights:
        table = weights.tensors["wte.weight"].load()
    for state in (found.state_dict(), {"transformer.wte.weight": torch.tensor(table)}):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
