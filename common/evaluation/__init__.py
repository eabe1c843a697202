"""Evaluation without the model: rows of tokens to score, and figures from their scores."""
