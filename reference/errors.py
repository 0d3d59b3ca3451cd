"""What ddplab raises for things that go wrong outside its own code.

Error:
    ├── TraceError (also a ValueError)    a trace file that cannot be used
    ├── ModelError (also a ValueError)    a model name that leads nowhere, or to something else
    ├── LinkError  (also an OSError)      virtual links that this machine or user cannot have
    └── RankError  (also a RuntimeError)  a rank that raised, died or was stuck

Arguments that make no sense are plain ValueErrors; misuse of data parallelism is a RuntimeError, as in torch.

"""


class Error(Exception):
    """Whatever went wrong, its message says what was expected, what was seen, where, and what to do."""


class TraceError(Error, ValueError):
    """A trace file that cannot be used; the message names the file, the field and the reason."""


class ModelError(Error, ValueError):
    """No such model, or a callable that does not return `(module, loss_fn)`."""


class LinkError(Error, OSError):
    """Network namespaces or virtual links that this machine or this user cannot have."""


class RankError(Error, RuntimeError):
    """A rank failed; the message holds the rank and, where it raised, its traceback.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
