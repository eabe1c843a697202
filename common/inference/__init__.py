"""Open a language model from any folder that holds one, and ask it for text and scores.

``gpt2_toolkit`` is the public name of this package.
"""
