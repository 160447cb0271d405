"""The rows of the table of operations, by subject, each beside its facts."""
