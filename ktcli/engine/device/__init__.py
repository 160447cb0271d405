"""The engine with a GPU: attention, dense parts and the most used experts are there, all others on the CPU."""
