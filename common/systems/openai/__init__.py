"""OpenAI's own TensorFlow code of GPT-2: ``openai``, read only."""

from common.systems.openai.read import detects, open_openai
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "openai": WeightFormat(
            title="a TensorFlow checkpoint of OpenAI's GPT-2",
            detects=detects,
            open=open_openai,
            holds_run=False,
        )
    }
)
