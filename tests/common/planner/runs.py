"""Runs to plan: the presets, and a small one."""

from pathlib import Path
from typing import Any

from common.accelerators import require_accelerator
from common.config.load import build_config
from common.config.schema import RunConfig
from common.parallel.run import Run
from common.resolve.derive import resolve_config, written_ranks
from common.run_config import load_config

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs" / "gpt2"
ASCEND, A100, H100 = map(require_accelerator, ("Ascend 910A", "A100", "H100"))


def written(name: str, *overrides: str) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def preset(name: str, *overrides: str, ranks: int | None = None) -> Run:
    config = written(name, *overrides)
    return resolve_config(config, world_size=ranks or written_ranks(config))


def small(*, tensor: int = 1, pipeline: int = 1, data: int = 1, **sections: Any) -> Run:
    sizes = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "seq_length": 32}
    tree: dict[str, Any] = {
        "output_dir": "nowhere",
        "model": sizes | {"vocab_size": 1000},
        "train": {"micro_batch_size": 2, "accumulation_steps": 8},
        "optimizer": {"learning_rate": 0.1},
        "parallel": {"model_parallel": tensor, "pipeline_stage": pipeline},
    }
    for name, values in sections.items():
        is_update = isinstance(values, dict) and name in tree
        tree[name] = {**tree[name], **values} if is_update else values
    return resolve_config(build_config(tree), world_size=data * tensor * pipeline)
