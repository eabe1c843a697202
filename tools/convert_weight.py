"""Convert weights of GPT-2 between formats, a tensor at a time.

    python tools/convert_weight.py --to mindformers --input HF_FOLDER --output FOLDER [--verify]
    python tools/convert_weight.py --to onnx --dtype int8 --input output/first --output FOLDER
    python tools/convert_weight.py --torch_path pytorch_model.bin --mindspore_path gpt2.ckpt
                                                                      as MindFormers' own did

FORMAT: hf, torch_gpt2 and mindspore (our own folder), megatron, megatron_core. mindformers
and mindformers_r0.3 are a .ckpt, or the rank_N folders of a run with its strategy files. deepspeed
(Megatron-DeepSpeed), fleetx and oneflow are read only, onnx and gguf are written only.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

from common.conversion.convert import convert, convert_as_mindformers_did
from common.errors import ConfigError
from common.flags import at_least, flag
from common.program import command
from common.systems.table import FORMATS
from common.systems.weights import FLOATS


@dataclass(kw_only=True)
class Request:
    source_format: str | None = flag(
        "FORMAT: format of the input (default: told by its files)", "--from", choices=FORMATS
    )
    target_format: str | None = flag("FORMAT: format of the output; with --input and --output", "--to", choices=FORMATS)
    input: str | None = flag(
        "PATH: folder of the weights, a file of weights beside its config, or a model of the"
        " Hugging Face hub as hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
    )
    output: Path | None = flag("PATH: folder or file to write; a folder must be empty or absent")
    dtype: str | None = flag(
        "type of the weights written (default: as in the input, and float32 for torch_gpt2, onnx"
        " and gguf); int8 is for these three, int4 for onnx and gguf",
        choices=(*FLOATS, "int8", "int4"),
    )
    model_parallel: int = flag("N: tensor-parallel ranks of a target that has a file for each", default=1)
    pipeline_stage: int = flag("N: pipeline stages of such a target", default=1)
    weights_only: bool = flag("leave out the optimizer's state and the position of training")
    verify: bool = flag(
        "read the output back and compare it bit for bit; compare ids of a text and logits too where both have them"
    )
    layers: int | None = flag(
        "N: MindFormers' option: blocks of the file at --torch_path (default: 12)", type=at_least(1)
    )
    torch_path: Path | None = flag("FILE: MindFormers' option: Hugging Face's pytorch_model.bin to read")
    mindspore_path: Path | None = flag("FILE: MindFormers' option: the .ckpt to write")

    def __post_init__(self) -> None:
        theirs = {name: getattr(self, name) for name in ("layers", "torch_path", "mindspore_path")}
        ours = {
            each.name
            for each in fields(self)
            if each.name not in theirs and (getattr(self, each.name) or None) != each.default
        }
        if not any(value is not None for value in theirs.values()):
            if not ours >= {"input", "output", "target_format"}:
                raise ConfigError("--to, --input and --output are needed")
        elif ours or self.torch_path is None or self.mindspore_path is None:
            raise ConfigError("--layers, --torch_path and --mindspore_path go together, and with nothing else")


@command(
    Request,
    stopped="; nothing is left at the output",
    epilog="Exit code 0: converted; 1: the output could not be written; 2: the input or an option"
    " is wrong; 130 and 143: stopped. Nothing is left at the output unless it is 0.",
)
def main(request: Request) -> None:
    source: Path | str
    if request.torch_path and request.mindspore_path:
        source, target = request.torch_path, request.mindspore_path
        report = convert_as_mindformers_did(request.layers or 12, source, target)
    else:
        assert request.input is not None and request.output and request.target_format
        source, target = request.input, request.output
        report = convert(
            Path(source),
            target,
            source_format=request.source_format,
            target_format=request.target_format,
            dtype=request.dtype,
            weights_only=request.weights_only,
            verify=request.verify,
            model_parallel=request.model_parallel,
            pipeline_stage=request.pipeline_stage,
        )
    how = ", read back and equal bit for bit" if "sha256" in report else ""
    tensors, logits = report["tensors"], report.get("logits")
    run = ""
    if report["step"] is not None:
        moments = f"{tensors['optimizer']} tensors of the optimizer"
        run = f" and the run at step {report['step']} with {moments}"
    print(f"{target}: {tensors['weights']} parameters of {source} ({report['from']}){run}{how}")
    if logits and logits["compared"]:
        print(
            f"logits: largest difference {logits['largest_difference']:.2g}; largest logit"
            f" {logits['largest_logit']:.3g}"
        )
    elif logits:
        print(f"logits not compared: {logits['reason']}")
    if "text" in report:
        print(f"text: {report['text']}")
    names = {why: name for name, why in report["ignored"].items()}
    for why, count in Counter(report["ignored"].values()).items():
        print(f"not written: {f'{names[why]} ({why})' if count == 1 else f'{count} x {why}'}")
