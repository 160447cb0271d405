"""Tells routers which KV pages a server holds, in vLLM's format over ZeroMQ."""
