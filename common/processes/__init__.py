"""The processes of a run: how they are started, watched and ended, and how those of several hosts
find and talk to each other.
"""
