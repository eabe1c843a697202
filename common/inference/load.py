"""Open any folder that holds a model."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from common.accelerators import Hardware
from common.cluster.environment import ALONE, Process
from common.config.load import build_config
from common.device import Device
from common.errors import ConfigError
from common.inference.language_model import LanguageModel
from common.inference.runner import Runner
from common.inference.source import PROGRAMS, Source, find_source, open_tokenizer
from common.interrupts import end_at_once, handling
from common.parallel.run import Run
from common.paths import install
from common.planner.fitting import check_memory
from common.resolve.derive import resolve_mode, resolve_other
from common.tokenizer import Tokenizer
from common.training.data import describe_tokenizer
from common.training.opened_checkpoint import open_checkpoint
from common.training.start import multiple_for

Backend = Literal["auto", "torch", "mindspore", "onnx"]
PACKAGES = {"torch": "torch_gpt2", "mindspore": "mindformers_gpt2"}
"""The package of each backend; its module ``predict`` has ``open_runner``."""


def load_model(
    path: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto",
    dtype: str | Mapping[str, str] | None = None,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    batch_size: int = 8,
    threads: int | None = None,
    verify: bool = False,
) -> LanguageModel:
    """Open a language model; its sizes and its tokenizer come from the folder.

    path: a run folder, a checkpoint, an export, a Hugging Face folder, or any other weights that
    tools/convert_weight.py reads. backend: auto takes the one that the format needs, else that of the run if it is
    installed, else torch or MindSpore. dtype: the section precision, such as float32 or bf16; that of the run when left
    out. tokenizer: a tokenizer, or the folder of its files if these are not beside the model. batch_size: sequences at
    once, unless a call sets it. threads: number of CPU threads. verify: compare the SHA-256 of an export's files.

    Raises CheckpointError, ConfigError, TokenizerError and DeviceError.
    """
    source = find_source(Path(path), verify=verify)
    found = open_tokenizer(source, tokenizer)
    backend = choose_backend(source, backend)
    if source.is_program and dtype is not None:
        raise ConfigError(
            f"dtype={dtype}: the type of {source.path} was chosen when it was exported"
            " (export.weights); leave dtype out"
        )
    config = _config(
        source,
        backend=backend if backend in PACKAGES else "torch",
        device=device,
        precision=dtype,
        predict={"batch_size": batch_size},
        runtime={"threads": threads},
    )
    if source.is_program:
        runner = open_program(source, config)
    else:
        here = open_device(config, ALONE, lengths_vary=True)
        check_memory(resolve_other(config, world_size=1, hardware=hardware_of(here)), ALONE)
        opener = importlib.import_module(f"{PACKAGES[backend]}.predict").open_runner
        runner = opener(config, here, open_checkpoint(source.path, "the model"), describe_tokenizer(found))
    return LanguageModel(source, backend, config, found, runner)


def choose_backend(source: Source, wish: str) -> Backend:
    """Return the backend for a source. Raises ConfigError if the one wished for cannot run it."""
    only = PROGRAMS[source.format][0] if source.is_program else None
    if wish not in ("auto", "torch", "mindspore", "onnx"):
        raise ConfigError(f"backend={wish}: expected auto, torch, mindspore or onnx")
    if only is not None and wish not in ("auto", only):
        raise ConfigError(
            f"backend={wish}: {source.path} is of format {source.format}, which {only} runs; leave"
            " backend out, or open the checkpoint that it was made of"
        )
    if only is None and wish == "onnx":
        raise ConfigError(
            f"backend=onnx: {source.path} is not an ONNX folder; write one with --run_mode export"
            " export.format=onnx, or choose torch or mindspore"
        )
    if wish != "auto" or only is not None:
        return only or wish  # type: ignore[return-value]
    names = [str(source.run.get("backend", "torch")), *PACKAGES]
    here = [name for name in names if name in PACKAGES and importlib.util.find_spec(name)]
    if not here:
        raise ConfigError(
            f"neither torch nor mindspore is installed; {install('torch')}, or export the model"
            f" as ONNX and {install('export')}"
        )
    return here[0]  # type: ignore[return-value]


def _config(source: Source, **sections: Any) -> Run:
    """Return the config that opens the source on one device. Raises ConfigError."""
    sections["precision"] = sections["precision"] or source.run.get("precision") or "float32"
    for name in ("seed", "quantization"):
        if source.run.get(name) is not None and not source.is_program:
            sections[name] = source.run[name]
    # which leaves the vocabulary unpadded
    multiple = multiple_for(source.model.vocab_size, source.model.vocab_multiple)
    needed = {
        "output_dir": str(source.folder),
        "checkpoint": {"load": str(source.path)},
        "train": {"micro_batch_size": 1},
        "optimizer": {"learning_rate": 1.0},
        "model": source.model.model_dump(exclude_none=True) | {"vocab_multiple": multiple},
    }
    return resolve_mode(build_config({**needed, **sections}), "predict", world_size=1)


def open_program(source: Source, config: Run) -> Runner:
    """Open an export that runs without conversion. Raises CheckpointError and ConfigError."""
    backend, opener = PROGRAMS[source.format]
    if backend in PACKAGES:
        import_backend(backend, "device")
    runner: Runner = resolve_name(opener)(source, config)
    return runner


def open_device(config: Run, process: Process, *, lengths_vary: bool) -> Device:
    """Import the backend of a run and open its device. lengths_vary: whether most calls have
    another shape. Raises ConfigError and DeviceError.
    """
    device: Device = import_backend(config.backend, "device").open_device(config, process, lengths_vary=lengths_vary)
    return device


def hardware_of(device: Device) -> Hardware:
    return Hardware(kind=device.kind, name=device.name, memory=device.total_memory())


def import_backend(backend: str, module: str) -> Any:
    """Import a framework, and return our module for it. Raises ConfigError if the framework fails."""
    quieten_frameworks()
    with handling({signal.SIGINT: end_at_once}):
        try:
            importlib.import_module(backend)
        except ImportError as error:
            raise ConfigError(f"backend={backend}: it cannot be imported ({error}); {install(backend)}") from None
        return importlib.import_module(f"{PACKAGES[backend]}.{module}")


def quieten_frameworks() -> None:
    """Set the environment variables that frameworks read when they are imported."""
    os.environ.setdefault("GLOG_v", "3")  # silences MindSpore about absent devices
    # An installed torch_npu breaks `import torch` without CANN; the device that needs it loads it.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
