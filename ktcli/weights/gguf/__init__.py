"""GGUF files as checkpoints: the header, the config, names and tokenizer it holds, and its number formats."""
