"""Turns a name into a running engine: pulls, converts, plans and loads the model as needed."""
