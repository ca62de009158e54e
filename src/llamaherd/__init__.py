"""llamaherd."""
