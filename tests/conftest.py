"""For the whole suite: property tests draw the same examples in every run, and are not timed."""

import signal

from hypothesis import settings

# A job that a shell started in the background inherits SIGINT ignored; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("kt", deadline=None, derandomize=True)
settings.load_profile("kt")
