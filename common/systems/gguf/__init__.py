"""GGUF, as llama.cpp runs it: ``gguf``, read and written."""

from common.systems.gguf.read import detects, open_gguf, open_to_compute
from common.systems.gguf.write import write_gguf
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "gguf": WeightFormat(
            title="a GGUF file",
            detects=detects,
            open=open_gguf,
            open_to_compute=open_to_compute,
            write=write_gguf,
            dtypes=("float32", "float16", "int8", "int4"),
            holds_run=False,
        )
    }
)
