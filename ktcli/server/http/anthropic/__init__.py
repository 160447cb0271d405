"""The API of Anthropic: messages, and counting their tokens."""
