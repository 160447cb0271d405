"""LoRA adapters: reading, describing by the tensors that they change, merging and writing them; no kernels."""
