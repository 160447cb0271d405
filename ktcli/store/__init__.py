"""Finds models by name: which there are (catalog), fetching them (download), what is on disk (library)."""
