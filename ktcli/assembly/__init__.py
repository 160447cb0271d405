"""Makes a running engine of a name: the model is pulled, converted, planned and loaded if it is not yet."""
