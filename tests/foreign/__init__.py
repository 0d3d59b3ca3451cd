"""What other libraries train with, judged by `ddplab conform`: `make test-foreign`."""
