"""`python -m ktcli` is `kt`."""

from ktcli.start import run

run()
