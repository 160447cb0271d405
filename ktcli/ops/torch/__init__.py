"""Operations and packed weights in torch: the reference in plain torch, and Triton kernels."""
