"""Search for the best buckets of a model, and a bound that no buckets can beat."""
