"""The API of OpenAI: chat completions, completions, models."""
