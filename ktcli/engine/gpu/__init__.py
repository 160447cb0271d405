"""A model on a GPU: its weights, its cache, and the steps that run on them."""
