"""Continue prompts with the model of a folder, in whatever format it is.

The folder is a run, a checkpoint, an export (ONNX, MindIR, pt2, safetensors), a Hugging Face
folder, or other weights that tools/convert_weight.py reads.

    python tools/inference.py --model_dir output/first/onnx --prompt "Once upon a time" \\
        [max_new_tokens=40 top_k=40]

Keys of the section predict follow (run_gpt2.py --explain predict lists them); those that are left
out are the run's or the export's own. An ONNX folder is run without a training framework.

Exit code 0: success; 2: bad arguments or a bad model; 1: failure at run time.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.flags import flag
from common.program import command


@dataclass(kw_only=True)
class Request:
    model_dir: Path = flag(
        "DIR: folder of the model, a file in it, or a model of the Hugging Face hub as hf://OWNER/NAME", required=True
    )
    prompt: str | None = flag("TEXT: text to continue")
    prompt_file: str | None = flag("FILE: file of prompts: one a line, or .jsonl")
    tokenizer: str | None = flag("DIR: folder of the tokenizer (default: the model's own)")
    backend: Literal["auto", "torch", "mindspore", "onnx"] = flag("library that computes", default="auto")
    device: Literal["auto", "cpu", "cuda", "npu"] = flag("kind of device", default="auto")
    dtype: str | None = flag("TYPE: type of the computation: float32, bf16 or fp16 (default: the run's)")
    verify: bool = flag("compare the SHA-256 of an export's files before it is run")
    set: tuple[str, ...] = flag("settings of the section predict", positional=True, nargs="*", metavar="key=value")


@command(Request)
def main(request: Request) -> None:
    from common.inference.load import load_model
    from common.inference.run_modes import continue_with
    from common.log import start_log

    start_log()
    settings = [word if word.startswith("predict.") else f"predict.{word}" for word in request.set]
    settings += [f"predict.prompt={request.prompt}"] if request.prompt is not None else []
    settings += [f"predict.prompt_file={request.prompt_file}"] if request.prompt_file else []
    model = load_model(
        request.model_dir,
        backend=request.backend,
        device=request.device,
        dtype=request.dtype,
        tokenizer=request.tokenizer,
        verify=request.verify,
    )
    continue_with(model, settings)
