"""Tests. `make test` runs two processes of them, each of which computes on one core.

With more threads, those of OpenMP that wait would take the core of the other process: all would take twice as long.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
