"""Palette: the colours of all plots, by role.

Readers with deuteranopia or protanopia see any two of these colours apart (a test simulates both). Labels, markers or
positions repeat the meaning of a colour wherever several lines share a plot.
"""

INK = "#1b1b1b"  #: measured values, our predictions in a comparison, frames and text
FORWARD = "#8ecae6"  #: the forward pass
COMPUTATION = "#219ebc"  #: the backward pass, and computation in general
OPTIMISER = "#3d5a80"  #: the optimiser step
STRAGGLER = "#9c6b1e"  #: a rank that waits for a slower one
EXPOSED = "#d1495b"  #: communication that a rank waits for; a collective; the slower of two lines
HIDDEN = "#f6c4bd"  #: communication beside computation; a paler `EXPOSED`
COPIES = "#edae49"  #: copies into and out of buckets; a third line
COMPRESSION = "#5e2b7e"  #: work of a comm hook; a fourth line
QUIET = "#adb5bd"  #: whatever else takes time; gradients in a bucket
SMALL = "#eceef0"  #: background of errors that count as small

LINES = (COMPUTATION, EXPOSED, COPIES, COMPRESSION, INK)
"""Colours of lines without a role, in the order in which to take them."""
