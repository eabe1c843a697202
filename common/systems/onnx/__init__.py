"""ONNX, as onnxruntime and Hugging Face's optimum run it: ``onnx``, written only."""

from common.systems.onnx.write import GRAPH_FILE, write_onnx
from common.systems.weight_format import System, WeightFormat

SYSTEM = System(
    weight_formats={
        "onnx": WeightFormat(
            title="an ONNX folder",
            detects=lambda path: path.suffix == ".onnx" or (path / GRAPH_FILE).is_file(),
            write=write_onnx,
            dtypes=("float32", "float16", "int8", "int4"),
            holds_run=False,
            hugging_face_config=True,
        )
    }
)
