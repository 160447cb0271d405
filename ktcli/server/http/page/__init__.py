"""The chat page of a server: files that a browser runs, without a request to anywhere else."""
