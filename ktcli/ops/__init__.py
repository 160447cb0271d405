"""What layers are made of: operations on rows, and the backends that run them."""
