"""Hugging Face's GPT-2, as transformers reads and writes it: ``hf``."""

from common.systems.hugging_face.read import detects, open_hugging_face
from common.systems.hugging_face.write import write_hugging_face
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "hf": WeightFormat(
            title="a Hugging Face folder",
            detects=detects,
            open=open_hugging_face,
            open_as=open_hugging_face,
            write=write_hugging_face,
            holds_run=False,
        )
    }
)
