"""How many threads a test can ask for: kt starts no more than there are cores."""

from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.probe import SYSTEM_ROOT

TWO = min(2, len(read_cpu(SYSTEM_ROOT, ()).cores))  # one, on a machine with a single core
