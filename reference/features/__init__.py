"""Optional features of the reducer and of the wrapper: one file each; without them, an iteration enters none."""
