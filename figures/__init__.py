"""The figures. Each module has `panels()` for its data, a pure `draw(data, ax)`, and `caption()`."""
