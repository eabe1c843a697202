"""Completions over HTTP: many requests share the steps of one model."""
