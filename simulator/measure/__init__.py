"""Measures on this machine, with real ranks: calibration, training runs, and their comparison with predictions."""
