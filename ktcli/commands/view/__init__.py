"""Turns results into output for several commands: figures, tables and documents."""
