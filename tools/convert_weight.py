"""Convert weights of GPT-2 between formats, a tensor at a time.

    python tools/convert_weight.py --to mindformers --input HF_FOLDER --output FOLDER [--verify]
    python tools/convert_weight.py --to onnx --dtype int8 --input output/first --output FOLDER
    python tools/convert_weight.py --torch_path pytorch_model.bin --mindspore_path gpt2.ckpt
                                                                      as MindFormers' own did

FORMAT: hf, torch_gpt2 and mindspore (our own folder), megatron, megatron_core, fleetx, oneflow,
gguf. mindformers and mindformers_r0.3 are a .ckpt, or the rank_N folders of a run with its strategy
files. deepspeed (Megatron-DeepSpeed) and openai (TensorFlow) are read only, onnx is written only.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, exit_at_sigterm, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.conversion.convert import ConversionResult, convert, convert_as_mindformers_did
from common.conversion.runners import installed_runners
from common.errors import GPT2Error
from common.systems.table import FORMATS
from common.systems.weights import FLOATS

_OURS = ("source_format", "target_format", "input", "output", "dtype")
_SWITCHES = {"verify": False, "weights_only": False, "model_parallel": 1, "pipeline_stage": 1}
_OF_MINDFORMERS = ("layers", "torch_path", "mindspore_path")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    as_mindformers_did = _check(parser, arguments)
    try:
        if as_mindformers_did:
            source, target = arguments.torch_path, arguments.mindspore_path
            result = convert_as_mindformers_did(arguments.layers, source, target)
        else:
            source, target = arguments.input, arguments.output
            result = convert(
                Path(source),
                target,
                source_format=arguments.source_format,
                target_format=arguments.target_format,
                dtype=arguments.dtype,
                weights_only=arguments.weights_only,
                verify=arguments.verify,
                model_parallel=arguments.model_parallel,
                pipeline_stage=arguments.pipeline_stage,
                runners=installed_runners() if arguments.verify else None,
            )
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; nothing is left at the output", file=sys.stderr)
        return 130
    _say(result, source, target)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Exit code 0: converted; 1: the output could not be written; 2: the input or an"
        " option is wrong; 130 and 143: stopped. Nothing is left at the output unless it is 0.",
    )
    add = parser.add_argument
    add(
        "--from",
        dest="source_format",
        choices=FORMATS,
        metavar="FORMAT",
        help="format of the input (default: told by its files)",
    )
    add(
        "--to",
        dest="target_format",
        choices=FORMATS,
        metavar="FORMAT",
        help="format of the output; with --input and --output",
    )
    add(
        "--input",
        metavar="PATH",
        help="folder of the weights, a file of weights beside its config, or a model of the Hugging"
        " Face hub as hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
    )
    add(
        "--output",
        type=Path,
        metavar="PATH",
        help="folder or file to write; a folder must be empty or absent",
    )
    add(
        "--dtype",
        choices=(*FLOATS, "int8", "int4"),
        help="type of the weights written (default: as in the input, and float32 for torch_gpt2,"
        " onnx and gguf); int8 is for these three, int4 for onnx and gguf",
    )
    add(
        "--model_parallel",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks of a target that has a file for each (default: 1)",
    )
    add(
        "--pipeline_stage",
        type=int,
        default=1,
        metavar="N",
        help="pipeline stages of such a target (default: 1)",
    )
    add(
        "--weights_only",
        action="store_true",
        help="leave out the optimizer's state and the position of training",
    )
    add(
        "--verify",
        action="store_true",
        help="read the output back and compare it bit for bit; compare ids of a text and"
        " logits too where both have them",
    )
    add(
        "--layers",
        type=int,
        metavar="N",
        help="MindFormers' option: blocks of the file at --torch_path (default: 12)",
    )
    add(
        "--torch_path",
        type=Path,
        metavar="FILE",
        help="MindFormers' option: Hugging Face's pytorch_model.bin to read",
    )
    add(
        "--mindspore_path",
        type=Path,
        metavar="FILE",
        help="MindFormers' option: the .ckpt to write",
    )
    return parser


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> bool:
    """Return whether the arguments are those of MindFormers' own script. Ends the process where
    they are neither's.
    """
    given = vars(arguments)
    theirs = [given[name] for name in _OF_MINDFORMERS]
    if arguments.layers is None:  # r0.3's default
        arguments.layers = 12
    if theirs == [None] * len(theirs):
        if None in (arguments.input, arguments.output, arguments.target_format):
            parser.error("--to, --input and --output are needed")
        return False
    ours = any(given[name] for name in _OURS) or any(
        given[name] != value for name, value in _SWITCHES.items()
    )
    if ours or None in theirs[1:] or arguments.layers < 1:
        parser.error(
            "--layers (1 or more), --torch_path and --mindspore_path go together, and with nothing"
            " else"
        )
    return True


def _say(result: ConversionResult, source: Path | str, target: Path) -> None:
    how = ", read back and equal bit for bit" if result.read_back else ""
    run = (
        ""
        if result.step is None
        else f" and the run at step {result.step} with {result.moments} tensors of the optimizer"
    )
    print(
        f"{target}: {result.parameters} parameters of {source} ({result.source_format}){run}{how}"
    )
    if result.logits and result.logits["compared"]:
        print(
            f"logits: largest difference {result.logits['largest_difference']:.2g}; largest logit"
            f" {result.logits['largest_logit']:.3g}"
        )
    elif result.logits:
        print(f"logits not compared: {result.logits['reason']}")
    if result.text:
        print(f"text: {result.text}")
    names = {why: name for name, why in result.ignored.items()}
    for why, count in Counter(result.ignored.values()).items():
        print(f"not written: {f'{names[why]} ({why})' if count == 1 else f'{count} x {why}'}")


if __name__ == "__main__":
    # a scheduler's, which else leaves half of the output there
    exit_at_sigterm()
    run_script(main)
