"""GGUF files as checkpoints: their header, config, names, tokenizer and number formats."""
