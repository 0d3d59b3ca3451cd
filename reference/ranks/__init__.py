"""Processes of ranks: how they start, which network and cores they get, and the launchers that start them."""
