"""Model files and the meaning of their bytes: number formats, checkpoints, packs, and conversion."""
