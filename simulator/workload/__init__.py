"""What each rank computes."""
