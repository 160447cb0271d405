"""Measurements of an engine from outside: benchmarks, evaluation, calibration."""
