"""The facts of a machine: readers that turn the system's text into frozen dataclasses. No model code."""
