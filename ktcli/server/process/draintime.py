"""How long answers may take to finish once a server is told to end; nothing is imported, so that options may say it."""

DRAIN_S, DRAIN_MOST_S = 10.0, 3600
