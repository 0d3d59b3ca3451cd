"""Subject: the data-parallel class under test, by its name, and how a training script uses it.

A subject is named `module:name`. The name is that of a class or a function that wraps a module:

- with the constructor of torch's `DistributedDataParallel`, or a part of its arguments;
- `make_ddp(module, bucket_cap_mb)`; beside it, a function `finish(wrapped)` is called after each backward pass;
- a class with the method `average_gradients`, which is called after each backward pass;
- as in the assignment of Stanford's CS336: a class with the method `finish_gradient_synchronization`, or the function
  `get_ddp_bucketed` (or `get_ddp_individual_parameters`) of its adapters, whose `..._on_after_backward` is called;
- an adapter `make(module, optimizer)` of what shards or consumes gradients; it returns `(wrapped, step)`, and after
  `step()` parameters are compared.

Options that the class does not take are not supported, which is no failure.
"""

import dis
import gc
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from textwrap import shorten
from types import ModuleType
from typing import Any, NamedTuple, Self

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD, Optimizer

from ..reference.errors import Error
from ..reference.launch import rank_device
from ..user_modules import import_first_here

KIT = (
    *("/ddplab/conformance/", "/ddplab/learn/checks.py", "/ddplab/emulation/"),
    *("/reference/launch.py", "/reference/ranks/"),
)
"""Parts of the paths of files whose calls are not those of a class."""
CALLED = ("/torch/autograd/", "/torch/_tensor.py", "/torch/nn/modules/", "/torch/distributed/distributed_c10d.py")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
"""And of those that a class calls, which raise errors if it does so by mistake."""
CAP_NAMES = ("bucket_cap_mb", "bucket_size_mb")
"""Names of the argument with the bucket cap in MB."""
METHODS = ("no_sync", "register_comm_hook", "join", "shard_optimizer")
IGNORE = "_set_params_and_buffers_to_ignore_for_model"
"""A function of the class that names what it is to ignore."""
FINISHING = ("finish_gradient_synchronization", "average_gradients")
"""Methods that a script calls after each backward pass."""
AFTER_BACKWARD = {
    "get_ddp_bucketed": "ddp_bucketed_on_after_backward",
    "get_ddp_individual_parameters": "ddp_individual_parameters_on_after_backward",
}
"""Functions of CS336's adapters that wrap a module, with those to be called after a backward pass."""


class NotSupportedError(Exception):
    """The subject does not offer an option or a method; nothing failed."""


class RefusalError(Error):
    """The subject has raised an error on purpose: it refuses what was tried. On a rank, it ends the body."""


class OperatorError(Error):
    """A tensor operator, not the subject, refuses what was tried. On a rank, it ends the body."""


CRASHES = (
    *(NameError, AttributeError, LookupError, ArithmeticError, AssertionError, RecursionError, ImportError),
    *(MemoryError, EOFError, UnicodeError, SystemError),
)
"""Types of errors that come from mistakes; a class does not refuse an option with them."""
OF_TORCHS_REDUCER = re.compile(
    "Expected to (have finished|mark)|Expected sparse gradient|[Gg]raph has changed|by DDP reducer|DDP expects|"
    "during autograd execution|can only be called once|backend doesn't support|^Expected \\w+, got \\w+$|CUDA driver"
)
"""What torch's C++ says when its reducer refuses something, or lacks a GPU; no line of Python raises it."""
OF_TORCHS_OPERATORS = re.compile(
    "not (implemented|supported)|Could not run|[Uu]nsupported|doesn't (work|currently support)"
)
"""And when an operator does, for a dtype or a layout that it lacks."""
MOST_CHARACTERS = 300
"""Of the words of a refusal that are shown."""


def refusing(words: str, body: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a body on a rank; see `was_raised_on_purpose`.

    Raises RefusalError if the subject refuses what was tried, and OperatorError if an operator does.
    """
    try:
        return body(*arguments, **keywords)
    except Exception as error:
        is_operators = isinstance(error, RuntimeError) and OF_TORCHS_OPERATORS.search(str(error)) is not None
        by_operator = is_operators and not _is_of_a_raise(error)
        if (is_refusal := was_raised_on_purpose(error, words)) or by_operator:
            line = shorten(str(error).partition("\n")[0], MOST_CHARACTERS, placeholder=" ...")
            told = (RefusalError if is_refusal else OperatorError)(f"{type(error).__name__}: {line}")
            told.add_note(traceback.format_exc())  # a traceback is lost on the way to another process
            raise told from error
        raise


def was_raised_on_purpose(error: BaseException, words: str) -> bool:
    """Return whether a `raise` of the class has raised an error that says one of the words, or torch's reducer one.

    `words` is a regular expression. An error that a crash has caused is a crash, too.
    """
    told = str(error)
    if isinstance(error, CRASHES) or isinstance(error.__cause__, CRASHES) or "INTERNAL ASSERT" in told:
        return False
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    file = codes[-1].co_filename
    if "-packages/torch/" in file and (isinstance(error, TypeError) or codes[-2].co_name == "_check_comm_hook"):
        return False  # the class has given torch a wrong argument
    is_standard = file.startswith(STANDARD_LIBRARY) and "-packages/" not in file
    is_called = is_standard or any(path in file for path in (*KIT, *CALLED))
    if _is_of_a_raise(error) and not is_called and re.search(words, told, re.IGNORECASE):
        return True
    return isinstance(error, RuntimeError) and OF_TORCHS_REDUCER.search(told) is not None


def _is_of_a_raise(error: BaseException) -> bool:
    """Return whether a `raise` of Python has raised an error, and not a function in C."""
    innermost: Any = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    return bool(dis.opname[innermost.tb_frame.f_code.co_code[innermost.tb_lasti]] == "RAISE_VARARGS")


def error_line(error: BaseException, path: str) -> str:
    """Return file and line of a class where an error was raised, here or on a rank; empty if nowhere."""
    if isinstance(error, SyntaxError):
        return f"{path}, line {error.lineno}"
    lines: list[int] = []
    cause: BaseException | None = error if path else None
    while cause is not None:
        told = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
        lines += map(int, re.findall(rf'File "{re.escape(path)}", line (\d+)', told))
        places = traceback.extract_tb(cause.__traceback__)
        lines += [place.lineno or 0 for place in places if place.filename == path]
        cause = cause.__cause__
    shown = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return f"{shown}, line {lines[0 if 'innermost call first' in str(error) else -1]}" if lines else ""


class Offer(NamedTuple):
    """What a class shows before it has wrapped a module."""

    options: frozenset[str]  #: names of the arguments that it takes, bucket caps as `bucket_cap_mb`
    defines: frozenset[str]  #: names of what it and its bases below `nn.Module` define
    path: str = ""  #: the file that defines it; empty if it has none
    is_adapter: bool = False  #: whether parameters are compared after its own step


@dataclass(frozen=True)
class Subject:
    """A data-parallel class under test.

    Raises ValueError, on the first use, if the name is malformed, or nothing callable has this name.
    """

    name: str  #: ``module:name``; importable on every rank
    is_finished: bool = field(default=True, kw_only=True)
    """Whether the script calls what must follow a backward pass. False: the class has to average by itself."""
    one_order: bool = field(default=False, kw_only=True)
    """Whether gradients become ready in one order on all ranks, because the class is known to need that."""
    tolerance: float = field(default=0.0, kw_only=True)
    """Relative error of each addition that its averages may have, as of half precision."""

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        given = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return partial(type(self), **given), ()  # each rank imports the class by itself

    def offer(self) -> Offer:
        """Import the class and look at it."""
        classes = self.make.__mro__ if isinstance(self.make, type) else (self.make,)
        defines = frozenset(name for one in {*classes} - {*nn.Module.__mro__} for name in vars(one))
        path = getattr(sys.modules[self.make.__module__], "__file__", None) or ""
        return Offer(self.options, defines, path, self.is_adapter)

    def state(self) -> dict[str, list[int]]:
        """Return the identities of what each attribute of the class itself, not of an instance, is and contains."""
        own = [vars(one) for one in getattr(self.make, "__mro__", ()) if not one.__module__.startswith("torch.")]
        found = {name: held for one in own for name, held in one.items() if not name.startswith(("__", "_abc_"))}
        return {name: [*map(id, (one, *gc.get_referents(one)))] for name, one in found.items() if not callable(one)}

    @cached_property
    def make(self) -> Callable[..., nn.Module]:
        """The class or function that wraps a module."""
        found = getattr(self.module, self._attribute, None)
        if not callable(found):
            expected = f"expected a class or a function named {self._attribute} in {self.module.__name__}"
            raise ValueError(f"{self.name}: {expected}, got {'nothing' if found is None else type(found).__name__}")
        return found  # type: ignore[no-any-return]

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the arguments that it takes, bucket caps as `bucket_cap_mb`."""
        return frozenset([*self._arguments, *(["bucket_cap_mb"] if self._cap_name else [])])

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """Wrap a module, with arguments of torch's constructor; a cap is left out if the subject has no buckets.

        Raises NotSupportedError if the subject does not take one of the options.
        """
        cap_mb = options.pop("bucket_cap_mb", None)
        for option in options:
            if option not in self.options:
                raise NotSupportedError(f"it does not take {option}")
        if self._cap_name is not None:
            needs_cap = self._arguments[self._cap_name].default is inspect.Parameter.empty
            if needs_cap or cap_mb is not None:
                options[self._cap_name] = 25.0 if cap_mb is None else cap_mb
        return self.make(module, **options)

    @cached_property
    def is_adapter(self) -> bool:
        """Whether it needs the optimiser too, and returns `(wrapped, step)`."""
        optimizer = self._arguments.get("optimizer")
        return optimizer is not None and optimizer.default is optimizer.empty

    def prepare(
        self, module: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], **options: Any
    ) -> tuple[Any, Optimizer, Callable[[], object]]:
        """Wrap a module; returns it, its optimiser, and what a script calls to update the parameters."""
        if self.is_adapter:
            optimizer = make_optimizer(module)
            returned: Any = self.wrap(module, optimizer=optimizer, **options)
            if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
                raise TypeError(f"it returned {type(returned).__name__} instead of (wrapped, step)")
            return returned[0], optimizer, returned[1]
        wrapped = self.wrap(module, **options)
        optimizer = make_optimizer(wrapped)
        return wrapped, optimizer, optimizer.step

    def finish(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Call what must follow a backward pass, if anything must, unless the class has to do without."""
        if not self.is_finished or self.is_adapter:
            return
        if (after := getattr(self.module, AFTER_BACKWARD.get(self._attribute, ""), None)) is not None:
            after(wrapped, optimizer)
        elif (method := next((name for name in FINISHING if hasattr(wrapped, name)), None)) is not None:
            getattr(wrapped, method)()
        elif not isinstance(self.make, type) and (function := getattr(self.module, "finish", None)) is not None:
            function(wrapped)

    @cached_property
    def _attribute(self) -> str:
        return self.name.partition(":")[2] or "make_ddp"

    @cached_property
    def module(self) -> ModuleType:
        """The Python module that the class is in."""
        path, colon, attribute = self.name.partition(":")
        if not path or (colon and not attribute.isidentifier()):
            expected = "expected MODULE:CLASS, such as torch.nn.parallel:DistributedDataParallel"
            raise ValueError(f"{expected}, got {self.name!r}")
        try:
            return import_first_here(path)
        except ImportError as error:
            expected = "expected the name of an importable module before the colon"
            raise ValueError(f"{self.name}: {expected}: {error}") from None

    @cached_property
    def _arguments(self) -> dict[str, inspect.Parameter]:
        """The arguments after the module; `**options` of a subclass stands for those of the class above it."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found: dict[str, inspect.Parameter] = {}
        for maker in self.make.__mro__ if isinstance(self.make, type) else (self.make,):
            own = list(inspect.signature(maker).parameters.values())
            found = {argument.name: argument for argument in own[1:] if argument.kind in named} | found
            if all(argument.kind is not argument.VAR_KEYWORD for argument in own):
                break
        return found

    @cached_property
    def _cap_name(self) -> str | None:
        return next((name for name in CAP_NAMES if name in self._arguments), None)


def methods_of(_rank: int, _world_size: int, subject: Subject) -> dict[str, str]:
    """Return each of `METHODS` that a wrapped module has, with the text of the error if it refuses a comm hook.

    The text is empty if it refuses none. Raises TypeError if the subject does not return a module.
    """
    module = nn.Linear(2, 1).to(rank_device())
    wrapped, *_ = subject.prepare(module, lambda _wrapped: SGD(module.parameters(), lr=0.1))
    if not isinstance(wrapped, nn.Module):
        raise TypeError(f"it returned {type(wrapped).__name__} instead of a module")
    found = {name: "" for name in METHODS if callable(getattr(wrapped, name, None))}
    if "register_comm_hook" in found:
        try:
            refusing("hook", lambda: wrapped.register_comm_hook(None, allreduce_hook))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - the checks of comm hooks will meet what is no refusal
            found["register_comm_hook"] = str(error) if isinstance(error, RefusalError) else ""
    return found
