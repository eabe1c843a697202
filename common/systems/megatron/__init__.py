"""Megatron-LM and Megatron-Core: ``megatron`` and ``megatron_core``."""
