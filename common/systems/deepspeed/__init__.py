"""Megatron-DeepSpeed: ``deepspeed``, read only."""
