"""The chat page of a server: files that a browser runs without requests to other servers."""
