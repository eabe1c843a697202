"""Integers of few bits in place of floats: what is quantized, with which scale, and how it is
rounded.

Both backends, the conversion to integers and the exports follow ``scheme``.
"""
