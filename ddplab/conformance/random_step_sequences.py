"""State machine: any sequence of training steps on a class that lives on the ranks, against plain lists."""

from dataclasses import replace

from reference.errors import RankError

from .check_runner import Bench, Search
from .class_under_test import Subject
from .local_training import FindingError, WeakProgramError, compare, run_locally
from .training_programs import (
    MOST_PASSES,
    ROWS,
    Kind,
    Program,
    ProgramStep,
    Script,
    Seen,
    Weight,
    Zero,
)

WEIGHTS = (Weight((2,)), Weight((3, 2), depth=1, layout="transposed"), Weight((), "float64"), Weight((4,)))
_scripts: list[Script] = []
"""On a rank: the script of the present machine."""


def begin(rank: int, world_size: int, subject: Subject, program: Program) -> None:
    """Construct the class on a rank, for the steps that follow."""
    _scripts[:] = [Script(subject, program, rank, world_size)]


def continue_with(_rank: int, _world_size: int, _subject: Subject, program: Program) -> Seen:
    """Run the last step of a program whose other steps this rank has run."""
    (script,) = _scripts
    script.program = program
    return script.run(len(program.steps) - 1)


def check(bench: Bench) -> None:
    """Run random sequences of steps, comparing after each.

    Raises:
        FindingError: The class is wrong; the message names the step, the program has all of them.
    """
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

    from .random_programs import CAPS_MB

    world_size, search = bench.world_size, Search()
    steps = st.builds(
        ProgramStep,
        kind=st.just("train"),
        used=st.tuples(*[st.permutations(range(len(WEIGHTS))).map(tuple)] * world_size),
        rows=st.tuples(*[st.integers(1, ROWS)] * world_size),
        zero=st.just("keep"),
        optimize=st.booleans(),
        evaluation=st.booleans(),
    )

    class Training(RuleBasedStateMachine):
        """A training script that goes on step by step."""

        program: Program

        @initialize(cap_mb=st.sampled_from(CAPS_MB), seed=st.integers(0, 99))
        def construct(self, cap_mb: float, seed: int) -> None:
            self.program = Program(WEIGHTS, (), {"bucket_cap_mb": cap_mb}, seed=seed)
            bench.run(begin, bench.subject, self.program)

        def _can_train(self) -> bool:
            return sum(step.kind == "train" for step in self.program.steps) < MOST_PASSES

        def _accumulated(self) -> bool:
            return bool(self.program.steps) and self.program.steps[-1].kind == "accumulate"

        @precondition(_can_train)
        @rule(step=steps, zero=st.sampled_from(["none", "zeros", "keep"]))
        def train(self, step: ProgramStep, zero: Zero) -> None:
            self._go_on(replace(step, zero="keep" if self._accumulated() else zero))

        @precondition(lambda self: "no_sync" in bench.methods and self._can_train())
        @rule(step=steps)
        def accumulate(self, step: ProgramStep) -> None:
            self._go_on(replace(step, kind="accumulate", evaluation=False))

        @precondition(lambda self: not self._accumulated())
        @rule(step=steps, kind=st.sampled_from(["evaluate", "change_lr"]))
        def do_something_else(self, step: ProgramStep, kind: Kind) -> None:
            self._go_on(replace(step, kind=kind))

        def _go_on(self, step: ProgramStep) -> None:
            self.program = replace(self.program, steps=(*self.program.steps, step))
            search.attempt(self._run_last_step)

        def _run_last_step(self) -> None:
            last = len(self.program.steps) - 1
            try:
                seen = bench.run(continue_with, bench.subject, self.program)
                expected = run_locally(self.program, world_size)[-1]
            except WeakProgramError:
                return
            except RankError as error:
                raise FindingError(str(error), self.program) from None
            for rank, want in enumerate(expected):
                if problem := compare(seen[rank], want, iteration=last, rank=rank):
                    raise FindingError(problem, self.program)

    wanted = bench.settings(max_examples=max(3, bench.effort.examples // 3), stateful_step_count=12)
    search.run(lambda: run_state_machine_as_test(Training, settings=wanted))
