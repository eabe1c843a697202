"""Commands of the pages that a test does not run as they are written, and what runs instead."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

ELSEWHERE = (
    *("npu-smi", "hccn_tool", "nvidia-smi", "cat"),  # the driver's programs and files
    *("pip", "python -m pip", "python -m venv", "git", "hf", "swanlab/bin/pip"),  # a network
    *("docker", "kubectl", "ssh", "sbatch", "srun", "mpirun", "horovodrun"),  # clusters
    *("python tools/lm_eval.py", "swanlab/bin/swanlab", "tensorboard"),  # other packages
    *("bash scripts/test.sh", "make benchmark"),  # long ones
)
"""The first words of commands of which nothing can be checked here."""

SCRIPTS_ELSEWHERE = "lm_eval"
"""The package whose blocks of Python are only compiled: it fetches its tasks from the network."""

OWN = {"docs/ascend.md": {"data/corpus_text_document", "data/vocab", "/data/wikitext-2.mindrecord", "/data/gpt2"}}
"""Data that a page takes as the reader's own, by page."""


@dataclass(frozen=True)
class Shorter:
    """A command that takes minutes as it is written: what the suite changes, and the run folder
    whose numbers differ for that. The campaign runs it as it is.
    """

    page: str
    command: str
    """A pattern of the commands."""
    words: str
    """Overrides that the suite adds."""
    run: str
    """A pattern of its name."""
    replaced: tuple[str, str] = ("", "")


_CHINESE = (
    "model.num_layers=1 model.hidden_size=32 model.num_heads=2 model.seq_length=32"
    " model.max_positions=64 model.dropout=0 model.vocab_size=5000 data.stride=24"
    " train.max_epochs=null train.max_steps=6 train.global_batch_size=8 optimizer.warmup_steps=2"
    " optimizer.learning_rate=0.01 device=cpu logging.plot=false logging.tensorboard=false"
)
VALIDATION = "validation.max_samples=16"
"""Word added where a command validates the tiny preset on all its 128 windows, which takes longer than ten steps. Lines
on validation are then compared by form.
"""
_SMALL = (
    "model.num_layers=1 model.hidden_size=24 model.num_heads=2 validation.max_samples=4"
    " train.micro_batch_size=2 train.global_batch_size=2"
)
SHORTER = [
    Shorter(r"README", r"scripts/quickstart\.sh", f"train.max_steps=6 {_SMALL}", "output/quickstart"),
    Shorter(r"first_hour", r"scripts/quickstart\.sh", f"train.max_steps=6 {VALIDATION}", "output/quickstart"),
    Shorter(r"README", r"run_gpt2_tiny\.yaml.*\btrain\b", _SMALL, "output/(?:first|twin|two)"),
    Shorter(r"first_hour", r"run_distribute.*max_steps=80", "train.max_steps=8", r"output/\w+"),
    Shorter(r"first_hour", r"run_distribute|mine\.yaml --run_mode train", "train.max_steps=6", r"output/\w+"),
    Shorter(r"chinese", r"torchrun .*train\.py", f"{_CHINESE} train.micro_batch_size=4", "model_2"),
    Shorter(r"chinese", r"/(train|eval)\.py|--run_mode train", _CHINESE, "model"),
    Shorter(r"chinese", r"--run_mode predict", f"{_CHINESE} predict.max_new_tokens=40", "model"),
    Shorter(r"chinese", r"--length 300", "", "model", ("--length 300", "--length 40")),
    Shorter(  # a file instead of the driver that it would ask
        r"ascend|launching|README",
        r'hccl_tools\.py --device_num "\[0,8\)" --server_ip \S+$',
        "--hccn_conf docs/examples/hccn_140.conf",
        "",
    ),
    Shorter(r"quantization", r"train\.max_steps=150", VALIDATION, "output/first_qat", ("max_steps=150", "max_steps=5")),
    Shorter(r"modelarts", r"--config=.* --run_mode=train", "--model.num_layers=1 --model.hidden_size=24", "bucket/out"),
]
"""A model of 82M parameters takes hours on a CPU, and the steps of the quickstart minutes."""


def runs_elsewhere(command: str) -> bool:
    bare = re.sub(r"^(?:\w+=\S+ +)+|^sudo +", "", command)
    return any(re.match(rf"{re.escape(name)}(?![\w./-])", bare) for name in ELSEWHERE)


def world_size(command: str) -> int:
    """The number of ranks that a launcher would start."""
    numbers = re.findall(r"--(?:nproc[_-]per[_-]node|num_gpus|num_accelerators|nnodes|worker_num)[= ](\d+)", command)
    return math.prod(map(int, numbers))


def shorter(page: str, command: str) -> Shorter | None:
    """Return how the suite shortens a command, None where it runs as it is."""
    found = (entry for entry in SHORTER if re.search(entry.page, page) and re.search(entry.command, command))
    return next(found, None)
