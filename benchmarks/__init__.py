"""Benchmarks: programs that print measured times; none is a test."""
