"""Integers of few bits instead of floats: which tensors, which scales, which rounding.

Both backends, the conversion to integers and the exports follow ``scheme``.
"""
