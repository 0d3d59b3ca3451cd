"""The public score: predictions compared with published measurements and with our own runs."""
