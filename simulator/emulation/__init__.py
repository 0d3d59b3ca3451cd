"""Emulation: a real reducer trains on an accelerator and a network that take scheduled time."""
