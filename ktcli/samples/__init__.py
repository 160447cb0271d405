"""Samples for training, created from data files as ids of which some are trained; no torch, no engine."""
