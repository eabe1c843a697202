"""Configurations of MindFormers and FleetX, whole, in our words: held against the presets that
follow them.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import dump_config, flatten
from common.config.schema import QuantizationConfig
from common.errors import ConfigError
from common.parallel.operator_plan import splits_vocabulary
from common.resolve.derive import resolve_config, written_ranks
from common.resolve.engine_checks import check_here
from common.run_config import load_config
from common.systems.config import open_config
from tests.common.resolve.test_parallel_mode import TUTORIAL
from tools import convert_config

ORIGINALS = Path(__file__).parent / "originals"
SINGLE_CARD = ORIGINALS / "fleetx" / "pretrain_gpt_345M_single_card.yaml"
PRESETS = Path(__file__).parents[3] / "configs" / "gpt2"
NEUTRAL = Path(__file__).with_name("neutral.yaml")
OURS = {"data.train", "data.tokenizer", "output_dir", "logging", "validation", "checkpoint", "device", "predict"}
"""Choices of the presets: places of the data and the run folder, and how often a run saves and
logs.
"""


def differences(config: Any, preset: str, world_size: int) -> dict[str, tuple[Any, Any]]:
    """The resolved keys in which a configuration differs from a preset, with both values."""
    found, expected = (
        dict(flatten(resolve_config(each, world_size=world_size).model_dump()))
        for each in (config, load_config(PRESETS / f"{preset}.yaml"))
    )
    return {
        key: (found.get(key), expected.get(key))
        for key in sorted(found.keys() | expected.keys())
        if found.get(key) != expected.get(key) and not any(key == name or key.startswith(f"{name}.") for name in OURS)
    }


RUNS = yaml.safe_load((ORIGINALS / "presets.yaml").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_originals_runs_are_the_presets(name: str) -> None:
    (system, preset, devices, words), expected = RUNS[name]
    opened = open_config(ORIGINALS / name, words)
    assert opened.system == system
    assert differences(opened.config, preset, devices) == {key: tuple(both) for key, both in expected.items()}
    if system == "PaddleFleetX" and devices > 8:  # it takes dp_degree from its launcher
        assert written_ranks(opened.config) == devices


@pytest.mark.parametrize(
    ("words", "graph", "layout"),
    [
        (["device=npu"], 0, (1, 1, 1)), (["device=npu"], 0, (2, 2, 2)),
        (["device=cpu"], 0, (8, 1, 1)), (["device=cpu"], 1, (2, 2, 2)),
        (["device=auto"], 0, (1, 8, 1)), (["backend=torch", "device=cpu"], 0, (2, 2, 2)),
        (["backend=torch", "device=npu"], 1, (1, 8, 1)),
    ],
)  # fmt: skip
def test_keys_that_change_no_result_pass_everywhere(words, graph, layout, tmp_path) -> None:
    """On every backend and device, in both modes of the context, on one device and several."""
    text = (ORIGINALS / "mindformers_r1.yaml").read_text()
    tree = yaml.safe_load(text) | yaml.safe_load(NEUTRAL.read_text())
    tree["context"]["mode"] = graph
    tree["parallel"]["parallel_mode"] = 3 if graph else 1
    names = ("data_parallel", "model_parallel", "pipeline_stage")
    tree["parallel_config"] |= dict(zip(names, layout, strict=True))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [*words, "model.num_heads=8"]
    opened = open_config(tmp_path / "run.yaml", words)
    found = resolve_config(opened.config, world_size=math.prod(layout))
    assert tuple(getattr(found.parallel, name) for name in names) == layout
    assert found.parallel.zero_stage == (layout[0] > 1)
    assert found.train.recompute == ("none" if graph and "backend=torch" not in words else "full")
    if found.device == "auto":
        assert check_here(found, tmp_path) == "cpu"


@pytest.mark.parametrize("words", [["backend=torch"], ["device=cpu"], ["device=auto"], []])
def test_the_tutorials_sections_below_our_bases_run_everywhere(words, tmp_path) -> None:
    """Keys without effect are named by --show_config and in a line of the log; the rest is kept."""
    path = tmp_path / "tutorial.yaml"
    path.write_text(TUTORIAL.format(folder=PRESETS))
    opened = open_config(path, words)
    found = resolve_config(opened.config, world_size=32)
    shipped = resolve_config(load_config(PRESETS / "run_gpt2_13b.yaml"), world_size=32)
    parts = {"data_parallel", "model_parallel", "pipeline_stage", "zero_stage"}
    assert found.parallel.model_dump(include=parts) == shipped.parallel.model_dump(include=parts)
    assert found.train.global_batch_size == 192 and found.train.recompute == "full"
    # with a pipeline vocab_emb_dp is false in r0.3, whatever the file says
    assert splits_vocabulary(found)
    if words:
        assert "parallel.full_batch" in opened.yaml
        assert "have no effect here" in (opened.remark or "")
    else:  # on Ascends all of it acts
        assert (opened.yaml, opened.remark, found.device) == ("", None, "npu")
        said = {"parallel_mode": "semi_auto_parallel", "full_batch": True, "vocab_emb_dp": True}
        assert found.parallel == shipped.parallel.model_copy(update=said)
        assert found.train == shipped.train
    (tmp_path / "again.yaml").write_text(opened.yaml or dump_config(opened.config))
    assert load_config(tmp_path / "again.yaml") == opened.config


def test_convert_config_refuses_another_system_and_a_file_of_ours(tmp_path, capsys) -> None:
    """That what it writes is the same run, test_originals.py says of each file."""
    name, own = str(ORIGINALS / "mindformers_r1.yaml"), str(tmp_path / "ours.yaml")
    assert convert_config.main([name, "--output", own]) == 0
    assert open_config(own).system is None
    assert convert_config.main(["--from", "fleetx", name]) == 2
    assert "not in those of --from fleetx" in capsys.readouterr().err
    assert convert_config.main([own]) == 2
    assert "is in the words of this project already" in capsys.readouterr().err


def test_a_file_of_fleetx_that_is_not_there_names_the_way_that_works() -> None:
    name = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"
    with pytest.raises(ConfigError) as caught:
        open_config(name)
    said = str(caught.value)
    assert "work in your checkout with PYTHONPATH=" in said
    folder = re.findall(r"PYTHONPATH=(\S+),", said)[0]
    assert (Path(folder) / "paddle" / "distributed" / "launch.py").is_file()
    assert load_config(re.findall(r"the preset of this run is (\S+)", said)[0])


MERGED = """x-sizes: &sizes {hidden_size: 64, num_layers: 2, num_heads: 4}
common: {name: &name x-more, window: &window 32}
model: {model_config: {<<: *sizes, num_layers: 3, seq_length: *window}}
runner_config: {epochs: 1, batch_size: 1}
lr_schedule: {type: constant, learning_rate: 1.0e-4}
"""


def test_merge_keys_and_sections_with_only_anchors(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(MERGED)
    model = open_config(path).config.model
    assert (model.hidden_size, model.seq_length, model.num_layers, model.num_heads) == (64, 32, 3, 4)
    for text, message in (
        (MERGED.replace("{hidden_size", "{hiden_size: 1, hidden_size"), ":1: .*hiden_size: unknown key; did you mean"),
        (f"{MERGED}x-more: *window\n", ":[267]?: x-more: unknown key"),
        (f"{MERGED}*name : 3\n", ":[267]?: x-more: unknown key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"own\.yaml{message}"):
            open_config(path)
    *lines, last = MERGED.splitlines()
    path.write_text("\n".join((f"x-more: &more {{{last}}}", "<<: *more", *lines)))
    assert open_config(path).config.optimizer.learning_rate == 1e-4


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
_base_: {SINGLE_CARD}
"""
    )
    opened = open_config(tmp_path / "run.yaml")
    found = opened.config
    assert found.checkpoint.init_from == f"{tmp_path}/model.pdparams"
    skip = ["h.0.mlp.c_proj", "h.11.mlp.c_fc", "h.11.mlp.c_proj"]
    assert found.quantization == QuantizationConfig(weight_bits=4, freeze_embedding=True, skip=skip)
    assert "Compress.Quantization.activation_preprocess_type" in opened.ours.without_effect
    disabled = open_config(tmp_path / "run.yaml", ["Compress.Quantization.enable=False"])
    assert disabled.config.quantization is None


def test_a_section_that_inherits_nothing_and_one_that_an_override_fills(tmp_path: Path) -> None:
    """Its base clips gradients; Paddle's optimizer without grad_clip does not."""
    text = f"_base_: {SINGLE_CARD}\nOffline_Eval:\nOptimizer:\n"
    for inherited, norm in ((True, 1.0), (False, 0.0)):
        own = f"  _inherited_: {inherited}\n  lr: {{max_lr: 1.0e-3}}\n"
        (tmp_path / "run.yaml").write_text(text + own)
        found = open_config(tmp_path / "run.yaml", ["Offline_Eval.batch_size=3"]).config
        assert (found.optimizer.learning_rate, found.optimizer.clip_grad) == (1e-3, norm)
        assert found.evaluation.batch_size == 3
