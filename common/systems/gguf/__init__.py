"""GGUF, as llama.cpp runs it: ``gguf``."""
