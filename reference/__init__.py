"""Data-parallel training small enough to read: buckets, overlap, rebuild, recorded and replayable."""
