"""Serves loaded models over HTTP: the engine behind the APIs that people's programs already speak."""
