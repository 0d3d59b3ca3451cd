"""What torch.compile leaves out. Its compiler is loaded when such a function runs, because that takes a second."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])
not_compiled = cast("Callable[[_Function], _Function]", _disable_dynamo)
"""Decorator; torch's own classes use it too. The public `torch.compiler.disable` loads the compiler at once."""
