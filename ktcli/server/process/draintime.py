"""How long answers may take to finish when a server is stopped; imports nothing, so that options can use it."""

DRAIN_S, DRAIN_MOST_S = 10.0, 3600
