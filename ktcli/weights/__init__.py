"""Files and what their bytes mean: number formats, checkpoints, our packs, and the way between them."""
