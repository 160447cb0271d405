"""From a name to a running engine: pulled, converted, planned and loaded if it is not yet."""
