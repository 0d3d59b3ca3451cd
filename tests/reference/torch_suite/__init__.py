"""torch's own DDP tests, run with our class in torch's place; see `run`."""
