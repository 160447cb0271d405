"""What looks at an engine from outside: benchmarks, evaluation, calibration."""
