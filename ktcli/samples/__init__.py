"""Samples: what a trainer learns, made of data files as ids of which some are trained; no torch, no engine."""
