"""GPT2-Chinese and the study DistributedTrainingGPT2: command lines and model_config.json."""
