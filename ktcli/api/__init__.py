"""What Python programs import as `kt`: a loaded model with its answers and conversations."""
