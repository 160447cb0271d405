"""`kt bench`: the benchmarks, one command each."""
