"""Fine-tuning: gradients of low-rank factors through a model whose weights stay packed."""
