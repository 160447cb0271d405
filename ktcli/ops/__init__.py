"""The operations that layers consist of, and the backends that run them."""
