"""The rows of the table of operations, by what they are about, each beside the facts that it is given."""
