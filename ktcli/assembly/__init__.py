"""Leads from a name to a running engine: the model is pulled, converted, planned and loaded if it is not yet."""
