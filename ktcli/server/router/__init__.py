"""A router in front of several servers: what they are asked, its command line, and its process."""
