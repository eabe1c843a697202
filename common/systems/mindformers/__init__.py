"""MindFormers' GPT-2: ``mindformers``, and ``mindformers_r0.3`` before release 0.6."""
