"""What several commands show: figures, tables and documents made from results."""
