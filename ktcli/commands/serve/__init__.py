"""`kt serve` and `kt route`, and the commands that show and stop servers."""
