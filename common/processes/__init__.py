"""Processes of a run: starting, watching and ending them, and communication between hosts."""
