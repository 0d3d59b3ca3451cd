"""The learner's file: a class under test that carries its source, so that ranks always run the newest save."""

import linecache
import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

from ..conformance.class_under_test import Subject, error_line
from ..reference.files.reading import read_text
from .rungs import CLASS, check_name


class LearnerError(ValueError):
    """The learner's file cannot be run; the message names file, line and error."""


@dataclass(frozen=True)
class LearnerClass(Subject):
    """A class in a source text; every process runs this text, whatever the file `path` contains by then.

    Raises LearnerError, on the first use, if the text has no such class, or raises an error when it is run.
    """

    path: str = ""
    source: str = field(default="", repr=False)

    @cached_property
    def module(self) -> ModuleType:
        """The Python module that the text makes."""
        name = self.name.partition(":")[0]
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__learner_source__", None) == self.source:
            return known
        if known is not None and not hasattr(known, "__learner_source__"):
            raise LearnerError(f"{self.path}: another module is called {name}; rename the file, such as my_ddp.py")
        module = ModuleType(name)
        module.__dict__.update(__file__=self.path, __learner_source__=self.source)
        linecache.cache[self.path] = len(self.source), None, self.source.splitlines(keepends=True), self.path
        sys.modules[name] = module
        if multiprocessing.parent_process():  # a rank, whose end Gloo describes with all stacks
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        try:
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            where = error_line(error, self.path) or self.path
            raise LearnerError(f"{where}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error
        return module


def learner_class(path: Path, name: str = CLASS) -> LearnerClass:
    """Read the learner's file; raises ValueError if it cannot be read, or its name is no name of a module."""
    check_name(path)
    return LearnerClass(f"{path.stem}:{name}", str(path), read_text(path))
