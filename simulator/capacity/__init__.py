"""Capacity: how many GPUs on which network a training run needs, what limits it, and what it costs."""
