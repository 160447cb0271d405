"""A server as a process: sockets, signals, background operation, and how it is found and stopped."""
