"""A run of the checks on a class: which checks, what is expected of each, and the ranks that try the class."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from reference.launch import RankPool

from .all_checks import BASELINE, CHECKS
from .check_outcomes import Expectation, read_expectations
from .check_runner import FULL, QUICK, Bench, bench_on
from .class_under_test import Subject
from .overlap import load


@dataclass(frozen=True, kw_only=True)
class ConformanceRun:
    """The class under test, and how it is tried: values of the options of `ddplab conform`.

    Names of classes are `module:name`. Without `expect`, every check may only pass or not be supported.
    """

    subject: str
    against: str | None = None
    full: bool = False
    world_size: int = 3
    backend: str = "gloo"
    device: str | None = None
    expect: Path | None = None
    baseline: Path | None = None

    def expectations(self) -> dict[str, Expectation | None]:
        """Return all checks by name with what is expected of each.

        Raises:
            ValueError: A file is damaged, a class cannot be imported, there are too few ranks, or Hypothesis is not
                installed.
        """
        if find_spec("hypothesis") is None:
            raise ValueError("expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
        if self.world_size < (1 if self.device == "cuda" else 2):
            raise ValueError(f"world size: expected at least 2, got {self.world_size}")
        for name in {self.subject, self.against or self.subject}:
            Subject(name).check()
        expected = {} if self.expect is None else read_expectations(self.expect, list(CHECKS))
        found = {name: expected.get(name) for name in CHECKS}
        return found if self.baseline is None else found | dict.fromkeys(BASELINE, "must-pass")

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        """Start the ranks, which live as long as the context; they find out what the class can do.

        Raises:
            ValueError: The class does not wrap a module, or the file of schedules is damaged.
        """
        before = () if self.baseline is None else load(self.baseline)
        device = self.device or ("cuda" if self.backend == "nccl" else None)
        effort = FULL if self.full else QUICK
        with (
            RankPool(self.world_size, backend=self.backend, device=device) as ranks,
            bench_on(ranks, self.subject, effort, self.against) as bench,
        ):
            bench.baseline = before
            yield bench
