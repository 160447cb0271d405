"""Makes what several commands show from results: figures, tables and documents."""
