"""Checks of a machine and its peers before training.

This process loads no framework; other processes run an all-reduce.
"""
