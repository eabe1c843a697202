"""PaddleFleetX's own files of runs, beyond the runs that are presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.schema import QuantizationConfig, RunConfig
from common.resolve.derive import written_ranks
from common.systems.config import open_config

ORIGINALS = Path(__file__).parents[1] / "originals" / "fleetx"


def read(name: str, *words: str) -> RunConfig:
    return open_config(ORIGINALS / f"pretrain_gpt_{name}.yaml", words).config


@pytest.mark.parametrize(("size", "ranks"), [("6.7B_sharding16", 16), ("175B_mp8_pp16", 128)])
def test_a_layout_without_dp_degree_needs_its_own_ranks(size: str, ranks: int) -> None:
    """FleetX takes the number from its launcher; a plan without one takes sharding_degree."""
    assert written_ranks(read(size)) == ranks


def test_the_old_name_of_no_recompute_layers_may_be_empty() -> None:
    """The file of 345M in eight tensor parallel ranks has it."""
    assert read("345M_single_card", "Model.recompute_layers=None").train.recompute == "none"


@pytest.mark.parametrize(
    ("cloze", "task", "stride"), [("True", "lambada", None), ("False", "text", 32)]
)
def test_evaluation_on_lambada_and_on_wikitext(cloze: str, task: str, stride: int | None) -> None:
    """The file of evaluation gives overlapping_eval in both cases."""
    words = {"eval_path": "file", "cloze_eval": cloze, "overlapping_eval": "32"}
    given = [f"Offline_Eval.{name}={value}" for name, value in words.items()]
    found = read("345M_single_card", "Model.module=GPTEvalModule", *given).evaluation
    assert (found.task, found.file, found.stride) == (task, "file", stride)


def test_quantization_of_release_24(tmp_path: Path) -> None:
    """Compress, layers that stay in float, and pretrained as the prefix of a file."""
    (tmp_path / "model.pdparams").touch()
    (tmp_path / "run.yaml").write_text(
        f"""Compress:
  pretrained: {tmp_path}/model
  Quantization:
    enable: True
    activation_preprocess_type: PACT
    weight_bits: 4
    freeze_embedding: True
    skip_tensor_map: {{block_0: [linear2], block_11: [linear1, linear2]}}
    quantizable_layer_type: [Linear]
_base_: {ORIGINALS}/pretrain_gpt_345M_single_card.yaml
"""
    )
    opened = open_config(tmp_path / "run.yaml")
    found = opened.config
    assert found.checkpoint.init_from == f"{tmp_path}/model.pdparams"
    assert found.quantization == QuantizationConfig(
        weight_bits=4,
        freeze_embedding=True,
        skip=["h.0.mlp.c_proj", "h.11.mlp.c_fc", "h.11.mlp.c_proj"],
    )
    assert "Compress.Quantization.activation_preprocess_type" in opened.ours.without_effect
    disabled = open_config(tmp_path / "run.yaml", ["Compress.Quantization.enable=False"])
    assert disabled.config.quantization is None


def test_a_section_that_inherits_nothing(tmp_path: Path) -> None:
    """Its base clips gradients; Paddle's optimizer without grad_clip does not."""
    text = f"_base_: {ORIGINALS}/pretrain_gpt_345M_single_card.yaml\nOptimizer:\n"
    for inherited, norm in ((True, 1.0), (False, 0.0)):
        own = f"  _inherited_: {inherited}\n  lr: {{max_lr: 1.0e-3}}\n"
        (tmp_path / "run.yaml").write_text(text + own)
        found = open_config(tmp_path / "run.yaml").config.optimizer
        assert (found.learning_rate, found.clip_grad) == (1e-3, norm)
