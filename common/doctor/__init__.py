"""Is this machine, and are its peers, fit to train: checks without any framework in this process,
and an all-reduce in others.
"""
