"""The command `ddplab`."""
