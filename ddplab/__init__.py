"""What users start that is not a command: ddplab's pytest plugin, and the tests that it has options for."""
