"""The rows of the table of operations, by subject, together with their facts."""
