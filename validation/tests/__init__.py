"""Tests of the laboratory: `make test-lab`."""
