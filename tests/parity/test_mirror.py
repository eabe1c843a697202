"""The two backends read as one: the same files, but for those listed with their reasons."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ONE_SIDED_FILES = {
    "compilation.py": "MindSpore's graph mode compiles by itself",
    "deepspeed/*": "DeepSpeed is torch's",
    "semi_auto/*": "MindSpore's compiler splits graphs; torch's does not",
    "private_api.py": "MindSpore needs none of its private interfaces",
    "offload.py": "MindSpore's compiler decides where activations are",
    "products.py": "torch's products of few rows have several forms; MindSpore's graph has one",
    "parallel/private_api.py": "MindSpore needs none of its private interfaces",
    "int8.py": "torch has products of integers on a CPU; MindSpore takes such weights as float32",
    "layers.py": "torch's own layers and generators serve",
    "mindrecord.py": "MindSpore's own FileWriter writes the format; both backends read it without a framework",
    "parallel/collectives.py": "torch has all of them on every device; MindSpore's CPU has one",
    "parallel/zero.py": "FSDP2 is torch's",
    "parallel/replica_strategies.py": "they compare with torch's own DDP",
}
"""Files and folders of one backend."""


def files_of(backend: str) -> set[str]:
    return {path.relative_to(ROOT / backend).as_posix() for path in (ROOT / backend).rglob("*.py")}


def test_same_files() -> None:
    torch, mindspore = files_of("torch_gpt2"), files_of("mindformers_gpt2")
    others = {
        name if (folder := name.partition("/")[0] + "/*") not in ONE_SIDED_FILES else folder
        for name in torch ^ mindspore
    }
    assert others == set(ONE_SIDED_FILES)
