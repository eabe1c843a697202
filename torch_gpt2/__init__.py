"""GPT-2 on PyTorch: CUDA, Ascend NPU and CPU."""
