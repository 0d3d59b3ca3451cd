"""The ladder: a learner writes a reducer rung by rung, each judged by checks of the conformance kit."""

from typing import Any


def load_ipython_extension(ipython: Any) -> None:
    """Add the magics of `notebook.py`; IPython calls this for `%load_ext ddplab.learn`."""
    from .notebook import register

    register(ipython)
