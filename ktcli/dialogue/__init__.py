"""The common core of every conversation: turns messages into prompts, and an engine's events into an answer's."""
