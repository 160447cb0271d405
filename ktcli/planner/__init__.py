"""Plans where a model goes on a machine and how fast it will be: pure functions from facts to a plan."""
