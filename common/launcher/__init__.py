"""Launcher: starts the ranks of a host, waits for them, and ends all when one fails, on every
host.
"""
