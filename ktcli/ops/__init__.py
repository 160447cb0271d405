"""The operations that layers are made of, and the backends that run them."""
