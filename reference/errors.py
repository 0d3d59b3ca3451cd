"""Exceptions for problems outside ddplab's own code.

The tree of classes::

    Error (an Exception)                  base class
    ├── TraceError (also a ValueError)    a trace file cannot be used
    ├── ModelError (also a ValueError)    a model cannot be found or built
    └── RankError  (also a RuntimeError)  a rank raised an error, exited or timed out
        └── RanksUnmatchedError           ranks made different collectives, waited for each other, or lost one
            ├── RankLostError             a rank's process exited without reporting an error
            ├── RanksStillRunningError    ranks were still running at the time-out
            └── CollectiveError           a rank's connection to another one was lost, or timed out
                └── LaunchOrderError      the same with `debug=True`, which compares the launches of the ranks

An invalid argument is a plain ValueError; misuse of data parallelism is a RuntimeError, as in torch.
"""

from collections.abc import Mapping
from typing import Any


class Error(Exception):
    """Base class; each message states what was expected, what was seen, where, and what to do."""


class TraceError(Error, ValueError):
    """A trace file cannot be used; the message names the file, the field and the reason."""


class ModelError(Error, ValueError):
    """A model name cannot be resolved, or the user's code of the model fails."""


class RankError(Error, RuntimeError):
    """A rank failed.

    Attributes:
        rank: The first rank that failed.
        cause: What happened, with the name of the rank; nearly always one line.
        advice: What may be the reason, and the cure; empty if nothing is known.
        traceback: Where the rank raised an error; empty if it raised none.
        last_output: Stacks of ranks that hang, or the end of the standard error of a lost one; empty without them.
        returned: What other ranks had returned, by rank, if this rank was still running at a time-out.
    """

    def __init__(
        self,
        rank: int,
        cause: str,
        *,
        advice: str = "",
        traceback: str = "",
        last_output: str = "",
        returned: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause, self.advice = rank, cause, advice
        self.traceback, self.last_output, self.returned = traceback, last_output, returned or {}

    def __str__(self) -> str:
        advised = f"{self.cause.removesuffix('.')}: {self.advice}." if self.advice else self.cause
        parts = f"{advised} Traceback:" if self.traceback else advised, self.traceback, self.last_output
        return "\n\n".join(filter(None, parts))


class RanksUnmatchedError(RankError):
    """Ranks made different collectives, waited for each other, or lost one; each of these may cause the others."""


class RankLostError(RanksUnmatchedError):
    """A rank's process exited without reporting an error."""


class RanksStillRunningError(RanksUnmatchedError):
    """Ranks were still running at the time-out."""


class CollectiveError(RanksUnmatchedError):
    """A rank's connection to another one was lost, or a collective timed out."""


class LaunchOrderError(CollectiveError):
    """A collective failed, and the checked launch order compares what the ranks launched."""
