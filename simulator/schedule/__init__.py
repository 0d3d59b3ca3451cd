"""The steps of an iteration, which are equal on all ranks, and the cost of each step."""
