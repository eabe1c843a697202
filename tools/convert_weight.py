"""Convert weights of GPT-2 between formats, a tensor at a time.

python tools/convert_weight.py --to mindformers --input HF_FOLDER --output FOLDER [--from hf] [--dtype float16] [--verify]
python tools/convert_weight.py --layers 12 --torch_path pytorch_model.bin --mindspore_path gpt2.ckpt      as MindFormers' own did

FORMAT: hf, torch_gpt2 and mindspore (our own folder), mindformers, mindformers_r0.3, megatron, megatron_core; openai (TensorFlow) and
fleetx are read only.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.conversion.convert import convert, convert_as_mindformers_did
from common.conversion.logits import NEEDED, Runner
from common.errors import GPT2Error
from common.systems.table import FORMATS
from common.systems.weights import FLOATS


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.epilog = (
        "Exit code 0: done; 1: could not be written; 2: input or options at fault; 130 and 143: stopped. But for 0 nothing is left."
    )
    parser.add_argument("--from", dest="source_format", choices=FORMATS, metavar="FORMAT", help="found out when left out")
    parser.add_argument("--to", dest="target_format", choices=FORMATS, metavar="FORMAT")
    parser.add_argument("--input", type=Path, help="folder, or a file of weights beside its config")
    parser.add_argument("--output", type=Path, help="folder, which must not exist or be empty")
    parser.add_argument("--dtype", choices=FLOATS, help="of the output; as in the input when left out")
    parser.add_argument("--model_parallel", type=int, default=1, metavar="N", help="tensor ranks of a target with a file for each")
    parser.add_argument("--pipeline_stage", type=int, default=1, metavar="N", help="its pipeline ranks")
    parser.add_argument("--weights_only", action="store_true", help="leave out the optimizer's state and where training stood")
    parser.add_argument("--verify", action="store_true", help="read the output back, compare bit for bit, and logits where they run")
    parser.add_argument("--layers", type=int, help="number of blocks of the file at --torch_path")
    parser.add_argument("--torch_path", type=Path, help="Hugging Face's pytorch_model.bin")
    parser.add_argument("--mindspore_path", type=Path, help="the .ckpt to write")
    arguments = parser.parse_args(words)
    as_before = (arguments.layers, arguments.torch_path, arguments.mindspore_path)
    try:
        if as_before != (None, None, None):
            others = (arguments.source_format, arguments.target_format, arguments.input, arguments.output, arguments.dtype)
            switches = arguments.verify or arguments.weights_only or arguments.model_parallel != 1 or arguments.pipeline_stage != 1
            if None in as_before or arguments.layers < 1 or any(others) or switches:
                parser.error("--layers (1 or more), --torch_path and --mindspore_path go together, and with nothing else")
            source, target = arguments.torch_path, arguments.mindspore_path
            result = convert_as_mindformers_did(arguments.layers, source, target)
        else:
            source, target = arguments.input, arguments.output
            if None in (source, target, arguments.target_format):
                parser.error("--to, --input and --output are needed")
            result = convert(
                source,
                target,
                source_format=arguments.source_format,
                target_format=arguments.target_format,
                dtype=arguments.dtype,
                weights_only=arguments.weights_only,
                verify=arguments.verify,
                model_parallel=arguments.model_parallel,
                pipeline_stage=arguments.pipeline_stage,
                runners=_runners() if arguments.verify else None,
            )
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing was left at the output", file=sys.stderr)
        return 130
    verified = ", read back and equal bit for bit" if arguments.verify else ""
    run = "" if result.step is None else f" and the run at step {result.step} with {result.moments} tensors of the optimizer"
    print(f"{target}: {result.parameters} parameters of {source} ({result.source_format}){run}{verified}")
    if result.logits and result.logits["compared"]:
        print(f"logits: they differ by {result.logits['largest_difference']:.2g} of {result.logits['largest_logit']:.3g} at most")
    elif result.logits:
        print(f"logits: not compared, {result.logits['reason']}")
    names = {why: name for name, why in result.ignored.items()}
    for why, count in Counter(result.ignored.values()).items():
        print(f"left out: {names[why]}, {why}" if count == 1 else f"left out: {count} x {why}")
    return 0


def _runners() -> dict[str, Runner]:
    """By format what computes its logits, of the frameworks that are installed."""
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's warnings about devices that this machine does not have
    places = {
        "hf": ("torch_gpt2.logits", "hugging_face_logits"),
        "torch_gpt2": ("torch_gpt2.logits", "logits"),
        "mindspore": ("mindformers_gpt2.logits", "logits"),
    }
    return {
        format: partial(_run, *place) for format, place in places.items() if all(importlib.util.find_spec(name) for name in NEEDED[format])
    }


def _run(module: str, function: str, *arguments: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a scheduler's, which else leaves half of the output there
    run_script(main)
