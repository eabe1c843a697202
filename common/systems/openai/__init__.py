"""OpenAI's own TensorFlow code of GPT-2: ``openai``, read only."""
