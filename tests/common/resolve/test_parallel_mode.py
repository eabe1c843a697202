"""Modes 0 to 3 of MindSpore: MindFormers' own YAML, the settings that follow from presets, and what
is refused before any framework.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.resolve.derive import resolve_config, resolve_mode
from common.resolve.engine_checks import check_here
from common.resolve.parallel_mode import check_parallel_mode, compiled_mode
from common.resolve.vendor_settings import semi_auto_settings
from common.run_config import load_config
from tests.common.resolve.test_refusals import small_tree

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
GOLDEN = Path(__file__).parent / "golden" / "semi_auto"

TUTORIAL = """
base: [{folder}/model_config/gpt2_13b.yaml, {folder}/task_config/mindformers.yaml]
output_dir: out

context:
  mode: 0 # 0-静态图模式; 1-动态图模式
  device_target: "Ascend" # 运行的设备定义 支持 Ascend、CPU、GPU
  max_device_memory: "31GB" # 每张卡运行内存限制数量

parallel: # 并行环境配置
  parallel_mode: 1 # 0-数据并行, 1-半自动并行, 2-自动并行, 3-混合并行
  full_batch: True # 数据导入方式，打开即每设备获取的数据一致，关闭则每张卡采样数据不一致
  enable_parallel_optimizer: True # 开启优化器并行

recompute_config: # 重计算模块
  recompute: True # 打开重计算
  parallel_optimizer_comm_recompute: False # 是否开启优化器通信算子重计算
  mp_comm_recompute: True # 是否开启模型并行下通信算子的重计算
  recompute_slice_activation: True # 是否开启激活权重切片重计算

# 4机32卡
parallel_config: # 模型的并行配置
  data_parallel: 4 # 数据切分数量，batch维度切分
  model_parallel: 2 # 模型权重切分数量，权重维度上切分
  pipeline_stage: 4 # 流水并行切分stage数量，切分transformer layer层 <= 节点数
  optimizer_shard: True # 优化器并行打开
  micro_batch_num: 24 # micro batch number
  vocab_emb_dp: True # 词表是否使用数据并行
  gradient_aggregation_group: 4 # 梯度聚合组数，在组内融合通信算子，提升通信效率
"""
"""The parameters of the 13B tutorial of MindFormers r0.3, word for word, below the names of our
bases.
"""


def resolved(*, world_size: int = 4, **changes: Any) -> RunConfig:
    usual = {"backend": "mindspore", "device": "npu", "train__accumulation_steps": 4}
    tree = small_tree(**{**usual, **changes})
    return resolve_config(build_config(tree), world_size=world_size)


@pytest.mark.parametrize(
    ("name", "ranks", "rank"),
    [("run_gpt2_13b", 32, 9), ("run_gpt2_13b_dp4_mp8", 32, 31), ("run_gpt2_52b", 128, 127)],
)
def test_golden(name: str, ranks: int, rank: int) -> None:
    config = load_config(FOLDER / f"{name}.yaml", ["device=npu"])
    settings = semi_auto_settings(resolve_config(config, world_size=ranks), rank)
    text, golden = json.dumps(settings, indent=1) + "\n", GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "if that change is wanted: make golden"


def test_names_of_mindformers(tmp_path: Path) -> None:
    path, text = tmp_path / "own.yaml", TUTORIAL.format(folder=FOLDER)
    for old, new, message in (
        ("enable_parallel_optimizer: True", "enable_parallel_optimizer: False",
         r"own.yaml:\d+: parallel_config.optimizer_shard=True .*"
         " parallel.enable_parallel_optimizer=False"),
        ("vocab_emb_dp: True", "expert_parallel: 2",
         "parallel_config.expert_parallel=2: mixture of experts is not"),
        ("vocab_emb_dp", "vocab_emb_pd", r"own.yaml:\d+: parallel_config.vocab_emb_pd: unknown key;"
         " did you mean parallel_config.vocab_emb_dp"),
    ):  # fmt: skip
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    path.write_text(text.replace("vocab_emb_dp: True", "expert_parallel: 1"))
    named = ["parallel.strategy_ckpt_save_file=s_{rank}.ckpt", "recompute_config.recompute=false"]
    words = [
        "parallel_config.model_parallel=4", "parallel_config.use_seq_parallel=true", *named,
        "micro_batch_interleave_num=2", "parallel.parallel_mode=2",
    ]  # fmt: skip
    found = load_config(path, words)
    parallel = found.parallel
    assert (parallel.model_parallel, parallel.micro_batch_interleave_num) == (4, 2)
    assert parallel.sequence_parallel and parallel.parallel_mode == "auto_parallel"
    assert found.train.recompute == "none"
    named += ["parallel.parallel_mode=2", "parallel.loss_repeated_mean=true"]
    config = load_config(path, [*named, "train.recompute_slice_activation=false"])
    settings = semi_auto_settings(resolve_config(config, world_size=32), 5)
    assert settings["strategy_ckpt_config"]["save_file"] == "s_5.ckpt"


def test_the_mode_decides_the_splitter() -> None:
    several = resolved(parallel__model_parallel=2, device="auto")
    assert compiled_mode(several, "npu") and not compiled_mode(several, "cpu")
    assert not compiled_mode(resolved(world_size=1), "npu")
    modes = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
    for number, mode in enumerate(modes):
        config = resolved(parallel__parallel_mode=number)
        assert config.parallel.parallel_mode == mode
        assert compiled_mode(config, "npu") == (number in (1, 2))
    evaluated = resolve_mode(resolved(parallel__parallel_mode=1), "eval", world_size=1)
    assert not compiled_mode(evaluated, "npu")


def test_an_unknown_device_is_asked_again() -> None:
    config = resolved(device="auto", parallel__enable_alltoall=True)
    check_parallel_mode(config, "npu")
    with pytest.raises(ConfigError, match=r"parallel.enable_alltoall=True"):
        check_parallel_mode(config, "cpu")


def test_a_host_without_an_ascend_is_told_so_before_any_framework(tmp_path: Path) -> None:
    sliced = {"train__recompute_slice_activation": True, "train__recompute": "full"}
    chose = "^device=auto chose cpu because no Ascend was found .*leave it out"
    for changes, message in (
        ({"parallel__parallel_mode": 1}, "device=cpu; set parallel.parallel_mode=3"),
        ({"parallel__zero_stage": 2}, "parallel.zero_stage=2 is for backend torch"),
        ({"parallel__model_parallel": 2, **sliced}, chose),
        ({"parallel__model_parallel": 2, "context__device_id": 3}, chose),
    ):
        with pytest.raises(ConfigError, match=message):
            check_here(resolved(device="auto", **changes), tmp_path)
    assert check_here(resolved(device="auto"), tmp_path) == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    assert check_here(resolved(device="auto", parallel__parallel_mode=1), tmp_path) == "auto"


def test_other_names_of_zero() -> None:
    named = {"parallel__enable_parallel_optimizer": True}
    assert resolved(**named).parallel.zero_stage == 1
    shard = {"gradient_accumulation_shard": True}
    sharded = resolved(**named, parallel__parallel_optimizer_config=shard)
    level = semi_auto_settings(sharded, 0)["parallel_optimizer_config"]["optimizer_level"]
    assert level == "level2"
    strategy = semi_auto_settings(resolved(parallel__full_batch=False), 0)["dataset_strategy"]
    assert strategy == ((4, 1), (4, 1))


def test_documents_are_kept_apart_where_ranks_split_the_work() -> None:
    found = resolved(parallel__parallel_mode=0, data__reset_attention_mask=True)
    assert found.data.reset_attention_mask
