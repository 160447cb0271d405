"""The engine with a GPU: attention, dense parts and the hottest experts there, all others on the CPU."""
