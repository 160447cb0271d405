"""The parts models are made of, over a backend that runs them."""
