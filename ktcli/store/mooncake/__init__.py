"""Mooncake's store of KV pages: its client in a process of its own, and the tier that asks it."""
