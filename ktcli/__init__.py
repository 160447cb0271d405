"""kt: talk to Mixture-of-Experts models far larger than your VRAM, on one machine.

The package holds no code at this level: `kt --help` must start without loading anything heavy, so
each part is imported where it is used. The version below is the one place it is written.
"""

__version__ = "0.1.0"
