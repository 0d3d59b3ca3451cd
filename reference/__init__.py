"""Data-parallel training: averages gradients during the backward pass, starts ranks, records traces."""
