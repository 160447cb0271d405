"""The parts that models are made of, over a backend that runs them."""
