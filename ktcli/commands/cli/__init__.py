"""The command line itself: the table of commands, shared options, and help."""
