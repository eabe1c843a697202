"""OneFlow-Benchmark's GPT: ``oneflow``."""
