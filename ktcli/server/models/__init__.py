"""The models in a server's memory: loaded when they are named, each with an engine on its own thread."""
