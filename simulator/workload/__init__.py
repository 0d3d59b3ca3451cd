"""Compute times of each rank: recorded, sampled, or derived from a data sheet."""
