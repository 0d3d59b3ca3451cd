"""Comm hooks: what a bucket's gradients go through instead of the all-reduce."""
