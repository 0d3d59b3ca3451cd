"""Search for fast buckets of a model, and a bound that no buckets can beat."""
