"""What all ranks do in an iteration, and what each step costs."""
