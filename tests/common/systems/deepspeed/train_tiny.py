"""Tiny models with Megatron-DeepSpeed's names, trained and saved by DeepSpeed itself.

``python train_tiny.py FOLDER RANKS,CASE,CASE ...``. FOLDER/CASE gets the checkpoint.
FOLDER/CASE.rank_N.pt gets the rank's parameters and optimizer by DeepSpeed's own interfaces.
"""

import argparse
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.runtime.engine
import torch
import torch._dynamo  # once, and not by each rank for its optimizer
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.ranks import free_port, rank_environment
from torch_gpt2.deepspeed.private_api import allow_float16, leave_out_shared_memory

LAYERS, WIDTH, HEADS, POSITIONS, ROWS, VOCABULARY = 3, 8, 4, 6, 32, 29
STEPS = 3
PRECISIONS: dict[str, Any] = {
    "float32": {},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
    "bfloat16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
SPLIT = {
    "word_embeddings.weight": 0, "query_key_value.weight": 0, "query_key_value.bias": 0, "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0, "dense.weight": 1, "dense_4h_to_h.weight": 1,
}  # fmt: skip
"""Parameters that Megatron splits, and the dim."""
Shapes = dict[str, tuple[int, ...]]
EMBEDDING: Shapes = {"word_embeddings.weight": (ROWS, WIDTH), "position_embeddings.weight": (POSITIONS, WIDTH)}
FINAL: Shapes = {"weight": (WIDTH,), "bias": (WIDTH,)}
BLOCK: Shapes = {
    f"{name}.{kind}": shape if kind == "weight" else shape[:1]
    for name, shape in {
        "input_layernorm": (WIDTH,),
        "self_attention.query_key_value": (3 * WIDTH, WIDTH),
        "self_attention.dense": (WIDTH, WIDTH),
        "post_attention_layernorm": (WIDTH,),
        "mlp.dense_h_to_4h": (4 * WIDTH, WIDTH),
        "mlp.dense_4h_to_h": (WIDTH, 4 * WIDTH),
    }.items()
    for kind in ("weight", "bias")
}


def split_dim(name: str) -> int | None:
    return next((dim for end, dim in SPLIT.items() if name.endswith(end)), None)


class Holder(nn.Module):
    """A module that has parameters of these shapes, by dotted names, and adds a number to its input
    that depends on all of them.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], first: int, tensor: tuple[int, int]) -> None:
        super().__init__()
        rank, size = tensor
        for number, (name, shape) in enumerate(shapes.items()):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(100 * first + number))
            dim = split_dim(name)
            part = whole if dim is None else whole.chunk(size, dim)[rank].clone()
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            module.register_parameter(last, nn.Parameter(part))

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs
        for number, parameter in enumerate(self.parameters()):
            total = total + (parameter * parameter).mean() * (0.25 + number / 64)
        return total


def whole_model(tensor: tuple[int, int]) -> nn.Module:
    """Build a model with the names of GPTModel."""
    shapes = {f"language_model.embedding.{name}": shape for name, shape in EMBEDDING.items()}
    for layer in range(LAYERS):
        shapes |= {f"language_model.encoder.layers.{layer}.{name}": shape for name, shape in BLOCK.items()}
    shapes |= {f"language_model.encoder.final_layernorm.{n}": shape for n, shape in FINAL.items()}
    return Holder(shapes, 0, tensor)


def tied_head(module: Any, inputs: Tensor) -> Tensor:
    return inputs + (module.word_embeddings.weight**2).mean()


def cast(inputs: Tensor) -> Tensor:
    return inputs * 1


def pipeline(topology: Any, tensor: tuple[int, int]) -> nn.Module:
    """Build a model as GPTModelPipe does: functions between the layers, and a tied head."""
    tied = {"tied_weight_attr": "word_embeddings.weight"}
    layers = [
        cast,
        TiedLayerSpec("embed", Holder, EMBEDDING, 1, tensor, **tied),
        cast,
        *(LayerSpec(Holder, BLOCK, 2 + layer, tensor) for layer in range(LAYERS)),
        cast,
        LayerSpec(Holder, FINAL, 90, tensor),
        TiedLayerSpec("embed", Holder, EMBEDDING, 1, tensor, forward_fn=tied_head, **tied),
    ]
    return PipelineModule(
        layers=layers, topology=topology, loss_fn=lambda outputs, _: outputs.mean(), partition_method="type:Holder"
    )


def train(folder: Path, case: str) -> None:
    """Train one case: precision_zeroN_ppP_tpT."""
    precision, zero, pipe, tensor = case.split("_")
    stages, size = int(pipe[2:]), int(tensor[2:])
    world, rank = dist.get_world_size(), dist.get_rank()
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=size, num_dp=world // stages // size)
    grid = PipelineParallelGrid(topology=topology)
    place = (topology.get_coord(rank).model, size)
    model = pipeline(topology, place) if stages > 1 else whole_model(place)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        mpu=None if stages > 1 else grid,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": int(zero[4:])},
            "zero_allow_untested_optimizer": True,
            "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
            **PRECISIONS[precision.removesuffix("fused")],
        },
    )
    dtype = getattr(torch, precision.removesuffix("fused"))
    for step in range(STEPS):
        batch = torch.full((1, 1), 1.0 + step, dtype=dtype)
        if stages > 1:
            engine.train_batch(iter([(batch, batch)] * 2))
            continue
        for _ in range(2):
            engine.backward(engine(batch).mean())
            engine.step()
    args = argparse.Namespace(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=4 * WIDTH,
        max_position_embeddings=POSITIONS, seq_length=POSITIONS, orig_vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=16, padded_vocab_size=ROWS, consumed_train_samples=6,
        tensor_model_parallel_size=size, pipeline_model_parallel_size=stages,
        params_dtype=dtype, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    engine.save_checkpoint(
        str(folder / case), client_state={"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    )
    torch.save(truth(engine), folder / f"{case}.rank_{rank}.pt")
    dist.barrier()


def truth(engine: Any) -> dict[str, dict[str, Any]]:
    """Return float32 weights and moments of each parameter, without the file that is tested."""
    outer, parts = engine.optimizer, ("exp_avg", "exp_avg_sq")
    inner = getattr(outer, "optimizer", outer)
    held: dict[Any, tuple[Any, ...]] = {}
    """Of float16 without ZeRO: the float32 copy and the moments, of each parameter or cut out of a flat vector."""
    for low, high in zip(getattr(outer, "fp16_groups", ()), getattr(outer, "fp32_groups", ()), strict=False):
        held |= {one: (copy, *map(inner.state.get(copy, {}).get, parts)) for one, copy in zip(low, high, strict=True)}
    if hasattr(outer, "fp32_groups_flat") and not engine.zero_optimization():
        for low, high in zip(outer.fp16_groups, outer.fp32_groups_flat, strict=True):
            vectors, sizes = (high, *map(inner.state[high].get, parts)), [one.numel() for one in low]
            for one, *cut in zip(low, *(vector.split(sizes) for vector in vectors), strict=True):
                held[one] = tuple(piece.view(one.shape) for piece in cut)
    if hasattr(outer, "_hp_optimizer_states_linked"):
        # it looks before torch's AdamW has made its state in the first step
        outer._hp_optimizer_states_linked = False
        outer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization() or engine.bfloat16_enabled():
            values = [safe_get_full_fp32_param(parameter)]
            values += [safe_get_full_optimizer_state(parameter, part) for part in parts]
        else:
            values = held.get(parameter) or [parameter, *map(inner.state.get(parameter, {}).get, parts)]
        found[name] = {
            part: value.detach().float().clone()
            for part, value in zip(("", ".exp_avg", ".exp_avg_sq"), values, strict=True)
            if value is not None
        } | {"dim": split_dim(name)}
    return found


def run_rank(folder: str, rank: int, ranks: int, port: int, cases: list[str]) -> None:
    os.environ |= rank_environment(rank, ranks, port)
    torch.set_num_threads(1)
    allow_float16(deepspeed)
    # a build takes a minute, and waits for ever for one that was killed
    leave_out_shared_memory(deepspeed)
    deepspeed.init_distributed("gloo")
    for case in cases:
        fused = case.split("_")[0].endswith("fused")
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if fused else type("None", (), {})
        train(Path(folder), case)
    dist.barrier()


def main() -> None:
    """Import once, and become as many ranks as each list of cases asks for."""
    folder, *jobs = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    for job in jobs:
        ranks, *cases = job.split(",")
        port = free_port()
        children = [
            context.Process(target=run_rank, args=(folder, rank, int(ranks), port, cases)) for rank in range(int(ranks))
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            sys.exit(f"{job}: {[child.exitcode for child in children]}")


if __name__ == "__main__":
    main()
