"""`kt eval`, for texts, data sets and tasks."""
