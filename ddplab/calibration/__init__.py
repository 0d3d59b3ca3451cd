"""Calibration: measures, on real ranks of this machine, the costs that predictions use."""
