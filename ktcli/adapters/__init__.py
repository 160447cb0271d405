"""LoRA adapters beside a model: read, described by the tensors they change, merged, written; no kernels."""
