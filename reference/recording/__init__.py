"""Recording: the clocks, hooks and observers with which an iteration is timed."""
