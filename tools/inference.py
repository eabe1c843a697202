"""Continue prompts with the model of a folder, in whatever format it is.

The folder is a run, a checkpoint, an export (ONNX, MindIR, GGUF, safetensors), a Hugging Face
folder, or other weights that tools/convert_weight.py reads.

    python tools/inference.py --model_dir output/first/onnx --prompt "Once upon a time" \\
        [max_new_tokens=40 top_k=40]

Keys of the section predict follow (run_gpt2.py --explain predict lists them); those that are left
out are the run's or the export's own. An ONNX folder is run without a training framework.

Exit code 0: success; 2: bad arguments or a bad model; 1: failure at run time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import GPT2Error

BACKENDS = ("auto", "torch", "mindspore", "onnx")
DEVICES = ("auto", "cpu", "cuda", "npu")


def main(words: list[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    from common.inference.load import load_model
    from common.inference.run_modes import continue_with
    from common.log import start_log

    start_log()
    settings = [
        word if word.startswith("predict.") else f"predict.{word}" for word in arguments.set
    ]
    settings += [f"predict.prompt={arguments.prompt}"] if arguments.prompt is not None else []
    settings += [f"predict.prompt_file={arguments.prompt_file}"] if arguments.prompt_file else []
    try:
        model = load_model(
            arguments.model_dir,
            backend=arguments.backend,
            device=arguments.device,
            dtype=arguments.dtype,
            tokenizer=arguments.tokenizer,
            verify=arguments.verify,
        )
        continue_with(model, settings)
    except (GPT2Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model_dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of the model, a file in it, or a model of the Hugging Face hub as"
        " hf://OWNER/NAME",
    )
    add("--prompt", metavar="TEXT", help="text to continue")
    add("--prompt_file", metavar="FILE", help="file of prompts: one a line, or .jsonl")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the model's own)")
    add("--backend", choices=BACKENDS, default="auto", help="library that computes (default: auto)")
    add("--device", choices=DEVICES, default="auto", help="kind of device (default: auto)")
    add(
        "--dtype",
        metavar="TYPE",
        help="type of the computation: float32, bf16 or fp16 (default: the run's)",
    )
    add(
        "--verify",
        action="store_true",
        help="compare the SHA-256 of an export's files before it is run",
    )
    add("set", nargs="*", metavar="key=value", help="settings of the section predict")
    return parser


if __name__ == "__main__":
    run_script(main)
