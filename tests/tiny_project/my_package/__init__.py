"""A project with a data-parallel class of its own, which CI checks with `ddplab conform`."""
