"""Palette: the colours of all plots, by role.

Readers with deuteranopia or protanopia see any two of these colours apart (a test simulates both). Labels, markers or
positions repeat the meaning of a colour wherever several lines share a plot.
"""

INK = "#1b1b1b"
"""Measured values, our predictions in a comparison, frames and text."""
FORWARD = "#8ecae6"
"""The forward pass."""
COMPUTATION = "#219ebc"
"""The backward pass, and computation in general."""
OPTIMISER = "#3d5a80"
"""The optimiser step."""
STRAGGLER = "#9c6b1e"
"""A rank that waits for a slower one."""
EXPOSED = "#d1495b"
"""Communication that a rank waits for; a collective; the slower of two lines."""
HIDDEN = "#f6c4bd"
"""Communication beside computation; a paler `EXPOSED`."""
COPIES = "#edae49"
"""Copies into and out of buckets; a third line."""
COMPRESSION = "#5e2b7e"
"""Work of a comm hook; a fourth line."""
QUIET = "#adb5bd"
"""Whatever else takes time; gradients in a bucket."""
SMALL = "#eceef0"
"""Background of errors that count as small."""

LINES = (COMPUTATION, EXPOSED, COPIES, COMPRESSION, INK)
"""Colours of lines without a role, in the order in which to take them."""
