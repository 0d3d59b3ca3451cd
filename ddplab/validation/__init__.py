"""Validation: training runs on real ranks of this machine, compared with predictions made before them."""
