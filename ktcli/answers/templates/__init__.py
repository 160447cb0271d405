"""Answer templates: what a checkpoint itself says of how its answers are to be read (`response_template`)."""
