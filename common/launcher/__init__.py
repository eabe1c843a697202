"""Launcher: starts the ranks of a host, waits for them, and ends all hosts when one fails."""
