"""A server as a process: sockets, signals, the background, and how it is found and ended"""
