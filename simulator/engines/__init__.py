"""The two engines, which give equal results: the event replay, and the closed form for constant speeds."""
