"""Completions over HTTP. Many requests share the steps of one model."""
