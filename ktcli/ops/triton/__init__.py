"""Triton kernels for NVIDIA GPUs. Not yet run on one."""
