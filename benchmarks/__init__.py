"""Benchmarks: each prints what it measures; none is a test."""
