"""Judges what a fine-tuned model has learned and forgotten: its loss of held-out rows, and its answers to questions."""
