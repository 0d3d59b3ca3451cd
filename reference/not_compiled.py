"""Exclude functions from torch.compile without loading its compiler on import, which takes a second.

The first call of an excluded function loads the compiler.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])
not_compiled = cast("Callable[[_Function], _Function]", _disable_dynamo)
"""Decorator of torch's own classes too. The public `torch.compiler.disable` loads the compiler when it decorates."""
