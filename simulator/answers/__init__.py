"""What follows from the spans of a simulated iteration."""
