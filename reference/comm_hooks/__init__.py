"""Comm hooks: functions that replace the all-reduce of a bucket."""
