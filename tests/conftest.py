"""For the whole suite: property tests draw the same examples in every run, and are not timed."""

from hypothesis import settings

settings.register_profile("kt", deadline=None, derandomize=True)
settings.load_profile("kt")
