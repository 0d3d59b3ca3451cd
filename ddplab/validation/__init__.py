"""Measurements on this machine with real ranks: calibration, and training runs to compare with predictions."""
