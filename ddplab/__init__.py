"""What users start: the command, ddplab's pytest plugin, and the tests that the plugin has options for."""
