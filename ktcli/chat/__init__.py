"""Text on top of the engine: conversations, templates, tokenizers, and the interactive prompt."""
