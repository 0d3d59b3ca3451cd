"""What a calibration measures, one concept a file: how a time is taken, and the bodies of ranks that take it."""
