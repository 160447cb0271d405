"""Training samples: files of conversations become tokens, each of which is trained or not."""
