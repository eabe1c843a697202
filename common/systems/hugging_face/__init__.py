"""Hugging Face's GPT-2, as transformers reads and writes it: ``hf``."""
