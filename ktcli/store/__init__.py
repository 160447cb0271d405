"""Finds models by name: known models (catalog), downloading them (download), models on disk (library)."""
