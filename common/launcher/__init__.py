"""Starts the ranks of a host, waits for them, and ends them all when one fails; hosts tell each
other.
"""
