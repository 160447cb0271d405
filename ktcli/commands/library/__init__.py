"""Commands that look after what is on disk."""
