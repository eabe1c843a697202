"""MindFormers' GPT-2: ``mindformers``, and ``mindformers_r0.3`` before release 0.6."""

from functools import partial

from common.systems.mindformers.read import detects, missing_config, open_mindformers
from common.systems.mindformers.write import write_mindformers
from common.systems.weight_format import System, WeightFormat


def _format(name: str, title: str) -> WeightFormat:
    return WeightFormat(
        title=title,
        detects=partial(detects, format=name),
        open=partial(open_mindformers, format=name),
        write=partial(write_mindformers, format=name),
        missing_config=partial(missing_config, format=name),
        open_as=lambda path, model: open_mindformers(path, name, model),
    )


SYSTEM = System(
    weight_formats={
        "mindformers": _format("mindformers", "a checkpoint of MindFormers (.ckpt)"),
        "mindformers_r0.3": _format(
            "mindformers_r0.3", "a checkpoint of MindFormers before 0.6 (.ckpt)"
        ),
    }
)
