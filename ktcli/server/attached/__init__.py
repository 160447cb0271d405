"""`kt chat` with a server's model, through the server's Unix socket: ids in, ids out."""
