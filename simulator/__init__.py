"""The discrete-event twin of `reference`: replays its traces under other buckets, networks and sizes."""
