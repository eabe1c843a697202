"""A language model out of any folder that holds one: found, checked, opened, asked for text and for
scores. ``gpt2_toolkit`` is its public name.
"""
