"""`python -m ktcli` is `kt`."""

from ktcli.main import run

run()
