"""State machine: any sequence of training steps on a class that lives on the ranks, against plain lists."""

from typing import Any

from torch import nn

from reference.errors import RankError

from .check_runner import Bench, Search
from .class_under_test import Subject
from .local_training import FindingError, WeakProgramError, compare, run_locally
from .training_programs import (
    MOST_PASSES,
    Kind,
    Net,
    Program,
    ProgramStep,
    Seen,
    Weight,
    Zero,
    look,
    optimizer_of,
    run_step,
)

WEIGHTS = (Weight((2,)), Weight((3, 2), depth=1, layout="transposed"), Weight((), "float64"), Weight((4,)))
_session: dict[str, Any] = {}
"""On a rank: module, wrapped module and optimiser of the present machine."""


def begin(rank: int, _world_size: int, subject: Subject, program: Program) -> None:
    """Construct the class on a rank, for the steps that follow."""
    net = Net(program, rank)
    _session.update(net=net, wrapped=subject.wrap(net, **program.options), optimizer=optimizer_of(program, net))


def continue_with(rank: int, world_size: int, subject: Subject, program: Program) -> Seen:
    """Run the last step of a program whose other steps this rank has run."""
    wrapped: nn.Module = _session["wrapped"]
    run_step(subject, wrapped, _session["optimizer"], program, len(program.steps) - 1, rank, world_size)
    return look(_session["net"], wrapped)


def check(bench: Bench) -> None:
    """Run random sequences of steps, comparing after each.

    Raises:
        FindingError: The class is wrong; the message names the step, the program has all of them.
    """
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

    from .random_programs import CAPS_MB

    world_size, search = bench.world_size, Search()
    orders = st.tuples(*[st.permutations(range(len(WEIGHTS))).map(tuple)] * world_size)
    rows = st.tuples(*[st.integers(1, 3)] * world_size)

    class Training(RuleBasedStateMachine):
        """A training script that goes on step by step."""

        program: Program

        @initialize(cap_mb=st.sampled_from(CAPS_MB), seed=st.integers(0, 99))
        def construct(self, cap_mb: float, seed: int) -> None:
            self.program = Program(WEIGHTS, (), {"bucket_cap_mb": cap_mb}, seed=seed)
            bench.run(begin, bench.subject, self.program)

        def _can_train(self) -> bool:
            return sum(step.kind == "train" for step in self.program.steps) < MOST_PASSES

        @precondition(_can_train)
        @rule(
            used=orders,
            rows=rows,
            zero=st.sampled_from(["none", "zeros", "keep"]),
            optimize=st.booleans(),
            evaluation=st.booleans(),
        )
        def train(self, used: Any, rows: Any, zero: Zero, *, optimize: bool, evaluation: bool) -> None:
            accumulated = bool(self.program.steps) and self.program.steps[-1].kind == "accumulate"
            self._go_on(
                "train", used, rows, "keep" if accumulated else zero, optimize=optimize, evaluation=evaluation
            )

        @precondition(lambda self: "no_sync" in bench.methods and self._can_train())
        @rule(used=orders, rows=rows)
        def accumulate(self, used: Any, rows: Any) -> None:
            self._go_on("accumulate", used, rows, "keep", optimize=False)

        @rule(used=orders, rows=rows, kind=st.sampled_from(["evaluate", "change_lr"]))
        def do_something_else(self, used: Any, rows: Any, kind: Kind) -> None:
            if self.program.steps and self.program.steps[-1].kind == "accumulate":
                return
            self._go_on(kind, used, rows, "keep", optimize=False)

        def _go_on(
            self, kind: Kind, used: Any, rows: Any, zero: Zero, *, optimize: bool, evaluation: bool = False
        ) -> None:
            step = ProgramStep(kind, used, rows, zero, optimize, evaluation)
            self.program = Program(WEIGHTS, (*self.program.steps, step), self.program.options, seed=self.program.seed)
            search.attempt(self._run_last_step)

        def _run_last_step(self) -> None:
            try:
                seen = bench.run(continue_with, bench.subject, self.program)
                expected = run_locally(self.program, world_size)[-1]
                for rank in range(world_size):
                    compare(seen[rank], expected[rank], iteration=len(self.program.steps) - 1, rank=rank)
            except WeakProgramError:
                return
            except (FindingError, RankError) as error:
                raise FindingError(str(error), self.program) from None

    wanted = bench.settings(max_examples=max(3, bench.effort.examples // 3), stateful_step_count=12)
    search.run(lambda: run_state_machine_as_test(Training, settings=wanted))
