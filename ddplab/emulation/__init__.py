"""Emulation: a real reducer trains on an emulated device and a modelled network, in virtual time."""
