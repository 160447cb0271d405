"""Serves loaded models over HTTP, through the APIs that programs already use."""
