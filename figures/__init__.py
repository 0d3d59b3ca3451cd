"""The figures: each module has `panels()`, its data; `draw(data, ax)`, which is pure; and `caption()`, in numbers."""
