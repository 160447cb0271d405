"""The one core of every conversation: messages to prompts, and an engine's events to an answer's"""
