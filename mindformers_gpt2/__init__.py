"""GPT-2 on MindSpore: Ascend and CPU.

Files, classes and parameters have the same names as in torch_gpt2, wherever the idea is the same.
"""
