"""ONNX, as onnxruntime and Hugging Face's optimum run it: ``onnx``, written only."""
