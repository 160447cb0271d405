"""The API of Anthropic: messages, and the count of their tokens."""
