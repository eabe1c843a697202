"""GPT-2 on MindSpore: Ascend and CPU. The same file, class and parameter names as torch_gpt2,
wherever the idea is the same.
"""
