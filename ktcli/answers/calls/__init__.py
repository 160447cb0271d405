"""Tool calls: how each family writes them in its answers, and how they are read as they arrive."""
