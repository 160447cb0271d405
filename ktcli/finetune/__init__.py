"""Fine-tuning: settings, the plan, the loop over optimizer steps, checkpoints and what is recorded of a run."""
