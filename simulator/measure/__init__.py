"""Measurements on this machine: calibration, training runs, validation. This folder needs torch."""
