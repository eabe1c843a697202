"""The two backends read as one: the same files, public names and parameters, but for the
differences listed with their reasons.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ONE_SIDED_FILES = {
    "compilation.py": "MindSpore's graph mode compiles by itself",
    "deepspeed/*": "DeepSpeed is torch's",
    "semi_auto/*": "MindSpore's compiler splits graphs; torch's does not",
    "program.py": "programs of torch.export are torch's",
    "device_step.py": "MindSpore's Optimizer is such a step",
    "decode_step.py": "MindSpore's is a method of its model, which its compiler makes a graph",
    "gradients.py": "torch's autograd adds them up in the parameters; MindSpore's gives them to the"
    " caller",
    "private_api.py": "MindSpore needs none of its private interfaces",
    "offload.py": "MindSpore's compiler decides where activations are",
    "products.py": "torch's products of few rows have several forms; MindSpore's graph has one",
    "parallel/private_api.py": "MindSpore needs none of its private interfaces",
    "float8.py": "torchao is torch's",
    "float8_head.py": "MindSpore has no product of float8",
    "int8.py": "torch has products of integers on a CPU; MindSpore takes such weights as float32",
    "layers.py": "torch's own layers and generators serve",
    "mindir.py": "MindIR is MindSpore's",
    "mindrecord.py": "MindSpore's own FileWriter writes the format; both backends read it without a"
    " framework",
    "parallel/collectives.py": "torch has all of them on every device; MindSpore's CPU has one",
    "parallel/zero.py": "FSDP2 is torch's",
    "parallel/replica_strategies.py": "they compare with torch's own DDP",
}
"""Files and folders of one backend."""

DIFFERENCES = {
    "base_engine.py": {"QueuedStep": "tensors of MindSpore; torch's engine keeps functions"},
    "checkpoint.py": dict.fromkeys(
        ("Copy", "Staging", "copy_at_once"),
        "torch copies through pinned memory; MindSpore makes arrays of tensors by itself",
    )
    | {"load_model": "torch's is in int8.py, since it may compute with integers"},
    "data.py": dict.fromkeys(
        ("pin_batch", "split", "to_device"),
        "torch copies a global batch once and splits it on the device; MindSpore's takes arrays",
    ),
    "device.py": {
        "TorchDevice": "the device record, under the framework's name",
        "MindSporeDevice": "the device record, under the framework's name",
        "attention_mask": "MindSpore's model makes its kernel's form itself",
        "wide_type": "MindSpore's step computes its few numbers in float32",
    },
    "parallel/data_parallel.py": {
        "LossSum": "what DDP wraps",
        "sum_over": "torch sums tensor by tensor, outside of graphs",
    },
    "loss.py": {
        "cross_entropy_sum": "a function around torch's autograd function",
        "CrossEntropySum": "the Cell itself: graphs hold no other communication",
    },
    "export.py": dict.fromkeys(
        ("Decode", "Logits", "TOLERANCE"),
        "MindIR's own graphs and record; torch's program is written as ONNX is",
    ),
    "predict.py": {"hugging_face_logits": "transformers runs on torch"},
    "model.py": {
        "round_linear_layers": "MindSpore's graph of a micro batch rounds them itself",
        "set_offload": "MindSpore's compiler decides where activations are",
        "CoreAttention": "recomputation is marked on Cells; in torch it wraps the method attend",
        "FusedAttention": "torch chooses the kernel within scaled_dot_product_attention",
        "WrittenAttention": "torch has a kernel for attention on a CPU",
        "attention_kernel": "torch's attention has three forms; MindSpore's is fused or not",
        "takes_fused_attention": "torch chooses the kernel within scaled_dot_product_attention",
    },
    "packing.py": {
        "document_mask": "MindSpore's model adds documents to its causal mask",
        "BlockAttention": "MindSpore has no such kernels",
    },
    "optimizer.py": {
        "Optimizer": "MindSpore has none with bias correction on a CPU",
        "local_shard": "ZeRO's split tensors are torch's",
        "sum_in_float32": "gradients are values in MindSpore, with types of their own",
        "parameter_groups": "DeepSpeed's kernels take the groups without an optimizer",
        "Shares": "ZeRO's split is FSDP2's in torch",
        "squares": "torch has norms of lists",
        "add_gradients": "torch sums gradients itself",
        "clip_factor": "MindSpore's update has it inside",
        "scale_gradients": "MindSpore's update multiplies by the factor itself",
    },
    "parallel/layout.py": {
        "own_dropout_keys": "what MindSpore's masks follow from",
        "seed_offset": "what torch's masks follow from",
        "tensor_group": "with sequence parallel, which is torch's",
    },
    "parallel/pipeline_parallel.py": {"Keys": "of dropout, which torch does not hand over"},
    "parallel/tensor_parallel.py": {
        "TensorGroup": "with sequence parallel, which is torch's",
        "ColumnLinear": "for asynchronous tensor parallelism, which is torch's",
        **dict.fromkeys(("Enter", "Leave"), "torch's are autograd functions"),
    },
    "parallel/world.py": {"serve_as_scheduler": "torch's ranks meet without one"},
}


def files_of(backend: str) -> set[str]:
    return {path.relative_to(ROOT / backend).as_posix() for path in (ROOT / backend).rglob("*.py")}


def public_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_same_files() -> None:
    torch, mindspore = files_of("torch_gpt2"), files_of("mindformers_gpt2")
    others = {
        name if (folder := name.partition("/")[0] + "/*") not in ONE_SIDED_FILES else folder
        for name in torch ^ mindspore
    }
    assert others == set(ONE_SIDED_FILES)


@pytest.mark.parametrize("name", sorted(files_of("torch_gpt2") & files_of("mindformers_gpt2")))
def test_same_public_names(name: str) -> None:
    different = public_names(ROOT / "torch_gpt2" / name) ^ public_names(
        ROOT / "mindformers_gpt2" / name
    )
    assert different == set(DIFFERENCES.get(name, {}))
