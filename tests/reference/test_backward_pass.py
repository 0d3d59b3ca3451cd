"""The states of a backward pass: scripts that leave the usual order of forward and backward passes.

Whatever a script does, each gradient is the rank's own or the average over the ranks; a synchronised forward pass
whose gradients were not averaged ends in an error; and torch's class does the same, with the exceptions that
`Comparison._difference` lists.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ..explore import examples
from . import backward_pass_bodies as bodies
from .backward_pass_bodies import Backward, Forward, Freeze, Grad, Join, Seen, Step, Zero

EVERY = bodies.WEIGHTS
STEP_TIMEOUT_S = 15.0
BOTH = (0, 1)


class Comparison:
    """Runs a script step by step on two ranks, and checks every step.

    Args:
        ranks: The ranks.
        options: Options of the class; `hook`: whether a comm hook averages.

    Attributes:
        steps: The steps so far.
        gradients: Gradients of our class, by rank.
        ended: The error that our class has raised. Empty: none.
        local: Weights whose gradients should be averaged but have not been yet.
        pending: Whether a synchronised forward pass waits for its averages.
        stray: Whether a pass under `no_sync` followed a synchronised forward pass that may still wait.
        hook_raised: Whether a comm hook has raised an exception, so that the next forward pass must raise one.
        torch_ended: Why the comparison with torch's class has ended. Empty: it goes on.
    """

    def __init__(self, ranks: Any, options: dict[str, Any]) -> None:
        self.ranks, self.options = ranks, options
        self.steps: list[Step] = []
        self.ended = ""
        self.torch_ended = ""
        self.pending = False
        self.gradients: list[Any] = []
        self.stray = self.hook_raised = False
        self.local: set[int] = set()
        self._averaged: list[int] = []  # ranks whose gradients are averages since the last step
        self._drop = ""
        self._has_averaged = False
        self._in_flight = False  # whether collectives may write into views of buckets, as in an unfinished pass
        self._torch_in_flight = False  # the same in torch's class, after a pass through one of the outputs
        ranks.run(bodies.begin, options)

    def go_on(self, step: Step) -> None:
        """Run a step and check the gradients and errors of all ranks after it."""
        forwards = [one for one in self.steps if isinstance(one, Forward) and one.grad]
        if isinstance(step, Backward) and not step.sync and not forwards[-1].sync:
            self.stray = self.stray or any(one.sync for one in forwards)
        self.steps.append(step)
        if isinstance(step, Join) and not self.torch_ended and self._torch_may_raise_on_one_rank(step, forwards):
            self.torch_ended, self._drop = "torch's class may raise its next error on one rank only", "torch"
        if self._averaged and not isinstance(self.steps[-2], Forward):
            self._has_averaged = True
        seen: list[Seen] = self.ranks.run(bodies.go_on, step, self._averaged, self._drop, timeout_s=STEP_TIMEOUT_S)
        self._drop = ""
        self.gradients = [one.gradients.get("ours") for one in seen]
        self.ended = next((one.errors["ours"] for one in seen if "ours" in one.errors), "")
        self.hook_raised = any(one.hook_raised for one in seen)
        if not self.ended and self.hook_raised:
            assert not (isinstance(step, Forward) and step.grad), f"no error after a hook raised: {self.steps}"
        elif not self.ended:
            self._check(step, seen)
        if not self.torch_ended:
            self._compare_with_torch(step, seen)

    def _torch_may_raise_on_one_rank(self, step: Join, forwards: list[Forward]) -> bool:
        """Whether torch's class may raise its error about gradients that were set to None on one rank only.

        The ranks with inputs have averages after the step, the others the gradients of a pass under `no_sync`.
        """
        return (
            bool(self.options.get("find_unused_parameters"))
            and 0 in step.counts
            and not all(x.sync for x in forwards)
        )

    def _passes(self) -> Iterator[Backward]:
        """The backward passes since the last synchronised forward pass, the latest first."""
        for step in reversed(self.steps):
            if isinstance(step, Forward) and step.sync and step.grad:
                break
            if isinstance(step, Backward):
                yield step

    @property
    def has_packed(self) -> bool:
        """Whether gradients of a completed backward pass wait for others before they are averaged."""
        return self.pending and any(not one.fault or one.retry for one in self._passes())

    @property
    def has_failed_on_one_rank(self) -> bool:
        """Whether one rank has finished its backward pass and the other has not; its next error is its own then."""
        return any(one.fault and one.ranks != BOTH for one in self._passes())

    @property
    def has_passed_twice(self) -> bool:
        """Whether the next backward pass through the last forward pass is not the first one."""
        kept = (one for one in reversed(self.steps) if isinstance(one, Backward) or getattr(one, "grad", False))
        return isinstance(next(kept), Backward)

    def _compare_with_torch(self, step: Step, seen: list[Seen]) -> None:
        torchs = next((one.errors["torch"] for one in seen if "torch" in one.errors), "")
        views = bool(self.options.get("gradient_as_bucket_view"))
        if isinstance(step, Backward | Forward):
            self._torch_in_flight = views and isinstance(step, Backward) and step.heads != "ab"
        same = bool(torchs) == bool(self.ended) and (
            bool(torchs) or self._in_flight or all(one.gradients["torch"] == one.gradients["ours"] for one in seen)
        )
        if not same:
            self.torch_ended = self._difference(
                torchs, all(x.gradients["ours"] == x.gradients["local"] for x in seen)
            )
            if not (self.torch_ended or torchs or self.ended) and self._torch_in_flight:
                return
            assert self.torch_ended, (
                f"{self.options}\n{self.steps}\nours: {self.ended or [one.gradients['ours'] for one in seen]}\n"
                f"torch: {torchs or [one.gradients['torch'] for one in seen]}"
            )
            self._drop = "torch"
        elif torchs:
            self.torch_ended = torchs
        elif isinstance(step, Backward) and step.fault and step.ranks != BOTH:
            self.torch_ended, self._drop = "torch's class may raise its next error on one rank only", "torch"

    def _difference(self, torchs: str, is_local: bool) -> str:
        """Return why our class differs from torch's. Empty: unknown.

        Args:
            torchs: The error of torch's class. Empty: none.
            is_local: Whether the gradients of our class are those of each rank alone.
        """
        forwards = [one for one in self.steps if isinstance(one, Forward) and one.grad]
        raised = any(isinstance(one, Backward) and one.fault for one in self.steps)
        evaluates = isinstance(self.steps[-1], Forward) and not self.steps[-1].grad
        if (
            evaluates
            and "Expected to have finished" in self.ended
            and any(isinstance(one, Join) for one in self.steps)
        ):
            return "after Join, our class reports an unfinished backward pass in a forward pass without gradients too"
        if raised and torchs and not self.ended:
            return "after an exception, torch's class counts the next backward pass as a second one"
        if raised and self.ended:
            return "after an exception that follows some launches, torch's class goes on"
        if raised and self.options.get("gradient_as_bucket_view") and not torchs and not self.ended:
            return "after an exception, the views of torch's class stay divided"
        if raised and self.hook_raised and not torchs and not self.ended:
            return "a comm hook that raises ends the backward pass of torch's class; ours accumulates all gradients"
        if raised and is_local and self.pending and not torchs and not self.ended:
            return (
                "torch's class counts the gradients of a pass that raised; ours waits for them, and may raise later"
            )
        if self.options.get("find_unused_parameters") and "gradient which is undefined" in torchs:
            return "torch's class raises an internal error if gradients that were not averaged are set to None"
        if self.options.get("static_graph") and "training graph has changed" in self.ended and not torchs:
            return "in a static graph, torch's class never averages a gradient that the first pass did not bring"
        if self.options.get("static_graph") and not self._has_averaged:
            return "in a static graph, torch's class averages in the first pass that reaches an output, or never"
        if (
            self.options.get("find_unused_parameters")
            and "Expected to have finished reduction" in torchs
            and any(not one.sync for one in forwards)
        ):
            return "in torch's class, an ignored output of a forward pass under no_sync counts as a gradient"
        last = self.steps[-1]
        through = [forwards[index] for index in last.of] if isinstance(last, Backward) and self.pending else []
        if not self.ended and (
            ("mark a variable ready only once" in torchs and not all(one.sync for one in forwards))
            or not (torchs or all(one.sync for one in through))
        ):
            return "in torch's class, a forward pass under no_sync counts for a synchronised one that waits"
        if self.stray and not self.ended:
            return "after a forward pass without backward, torch's class averages under no_sync"
        return ""

    def _check(self, step: Step, seen: list[Seen]) -> None:
        if isinstance(step, Join):
            self._averaged = list(BOTH)
            return
        where = f"{self.options}\n{self.steps}\n" + "\n".join(str(one.gradients) for one in seen)
        arrived = {w for one in seen for w in one.arrived if one.gradients["local"][w] is not None}
        means = [_mean([one.gradients["local"][weight] for one in seen]) for weight in EVERY]
        self._averaged, wrong = [], ""
        for rank, one in enumerate(seen):
            changed, averaged = False, isinstance(step, Backward)
            for weight, (mine, own, mean) in enumerate(
                zip(one.gradients["ours"], one.gradients["local"], means, strict=True)
            ):
                allowed = {own}
                if isinstance(step, Backward):
                    allowed |= {mean, mean or 0.0}  # 0.0: a weight that was frozen after the forward pass
                if mine not in allowed:
                    wrong = f"rank {rank}, weight {weight}: neither its own nor the average:\n{where}"
                averaged = averaged and (mine in (mean, mean or 0.0) or (mine == own and weight not in arrived))
                changed = changed or mine != own
            if averaged and changed:
                self._averaged.append(rank)
        if isinstance(step, Backward) and (self.pending or self._in_flight):
            self._in_flight = bool(self.options.get("gradient_as_bucket_view")) and len(self._averaged) < len(seen)
        elif isinstance(step, Forward) and step.grad and self._in_flight:
            self._in_flight, self._averaged, wrong = False, list(BOTH), ""
        assert self._in_flight or not wrong, wrong
        if isinstance(step, Forward) and step.grad:
            assert not self.local, f"weights {self.local} have not been averaged:\n{where}"
            self.pending = self.pending or step.sync
        elif isinstance(step, Backward) and self._averaged:
            self.local.clear()
            self.pending = False
        elif isinstance(step, Backward) and self.pending and (not step.fault or step.retry):
            forwards = [one for one in self.steps if isinstance(one, Forward) and one.grad]
            synchronises = any(forwards[index].sync for index in step.of)
            # A pass through a forward pass under `no_sync` counts for one that waits, unless that one has failed.
            if step.sync and (synchronises or not any(one.fault and not one.retry for one in self._passes())):
                self.local |= arrived
            # A pass through the sink is complete, whichever gradients it has brought.
            through = self.options.get("find_unused_parameters") or self.options.get("static_graph")
            self.pending = not (through and synchronises)
        elif isinstance(step, Zero) or (isinstance(step, Backward) and step.fault):
            self.local.clear()  # the exception has told the user that these gradients are not averaged


def _mean(values: list[float | None]) -> float | None:
    return None if all(one is None for one in values) else sum(one or 0.0 for one in values) / len(values)


def run(ranks: Any, options: dict[str, Any], *steps: Step) -> Comparison:
    """Run a script until our class raises an error."""
    script = Comparison(ranks, options)
    for step in steps:
        if not script.ended:
            script.go_on(step)
    return script


# Random scripts

OPTIONS = st.fixed_dictionaries(
    {
        "bucket_cap_mb": st.sampled_from([1e-6, 25]),
        "gradient_as_bucket_view": st.booleans(),
        "find_unused_parameters": st.booleans(),
        "static_graph": st.booleans(),
        "hook": st.booleans(),
    }
)
used_weights = st.sets(st.sampled_from(EVERY), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
factors = st.tuples(st.integers(0, 20).map(lambda n: 2.0 * n + 1), st.integers(0, 20).map(lambda n: 100.0 * n + 50))
heads = st.sampled_from(["ab", "ab", "a", "b"])
PLACES = ("loss", "output", "weight 0", "weight 3", "input", "input", "hook 0", "hook 1")


class Scripts(RuleBasedStateMachine):
    """Training scripts with steps in any order; a new script begins after an error.

    No rule has a because Hypothesis needs the same rules in each run of a script, and gradients that are
    views of buckets in flight may differ from run to run. A rule that makes no sense does nothing.

    Ranks that use different weights keep to the usual order. In another order, one rank may get all of its gradients
    and wait for ever for the other rank, which does not.
    """

    ranks: Any
    seen: list[Comparison]

    @initialize(options=OPTIONS, used=st.tuples(used_weights, used_weights), alike=st.booleans())
    def begin(self, options, used, alike):
        self.options, self.used = options, used
        self.alike = alike or not (options["find_unused_parameters"] or options["static_graph"])
        self.script = Comparison(self.ranks, options)
        self.seen.append(self.script)
        self.forwards: list[Forward] = []

    @rule(options=OPTIONS, used=st.tuples(used_weights, used_weights), alike=st.booleans())
    def begin_again(self, options, used, alike):
        if self.script.ended:
            self.begin(options, used, alike)

    @rule(
        factors=factors,
        used=st.tuples(used_weights, used_weights),
        sync=st.integers(0, 3),
        training=st.booleans(),
        grad=st.integers(0, 5),
    )
    def forward(self, factors, used, sync, training, grad):
        if self.script.ended:
            return
        if self.options.get("static_graph"):
            used = self.used
        elif not self.options.get("find_unused_parameters"):
            used = (EVERY, EVERY)
        if self.alike:
            used = (used[0],) * 2
        step = Forward(factors, used, sync > 0 or not self.alike, training, grad > 0)
        self.script.go_on(step)
        if step.grad:
            self.forwards.append(step)

    @rule(
        back=st.sampled_from([(-1,), (-1,), (-1,), (-2,), (-1, -2)]),
        heads=heads,
        sync=st.integers(0, 3),
        late=st.booleans(),
    )
    def backward(self, back, heads, sync, late):
        if self.script.ended or not self.forwards:
            return
        if not self.alike:
            if self.script.has_passed_twice:
                return  # torch's class fails on one rank if gradients that were not averaged are set to None
            back, heads, sync = (-1,), "ab", True
        elif -min(back) > len(self.forwards):
            back = (-1,)
        self.script.go_on(Backward(back, heads, bool(sync), late=late))

    @rule(
        heads=heads,
        where=st.sampled_from(PLACES),
        ranks=st.sampled_from([(0,), (1,), BOTH]),
        retry=st.booleans(),
        late=st.booleans(),
    )
    def backward_that_raises(self, heads, where, ranks, retry, late):
        """The exception is on one rank alone only where the other rank does not then wait for ever."""
        if self.script.ended or not self.forwards:
            return
        if where.startswith("hook") and (not self.options["hook"] or self.script.has_failed_on_one_rank):
            where = "output"
        if not self.alike:
            if self.script.has_passed_twice:
                return  # as in `backward`
            where, heads = ("loss" if where.startswith("weight") else where), "ab"
        if where.startswith("weight"):
            heads = "ab"  # an undefined gradient, of an output that the loss ignores, runs the hook of a weight too
        if where == "input" and heads == "ab" and not self.options.get("static_graph"):
            retry = retry and ranks == BOTH
        elif where not in ("loss", "output") or not retry:
            ranks = BOTH
        retry = retry and not where.startswith("hook")
        self.script.go_on(Backward((-1,), heads, True, where, ranks, retry, late))

    @rule(back=st.sampled_from([-1, -2]), by=st.sampled_from(["input", "weights"]))
    def grad(self, back, by):
        if self.script.ended or not self.forwards:
            return
        self.script.go_on(Grad(max(back, -len(self.forwards)), by))

    @rule(in_place=st.booleans())
    def zero(self, in_place):
        if self.script.ended or self.script.local or self.script.has_packed:
            return  # a later pass would write back averages of the gradients that are packed already
        self.script.go_on(Zero(in_place))

    @rule(weights=st.sampled_from([(), (), (0,), (1, 2), EVERY]))
    def freeze(self, weights):
        if self.script.ended or not self.alike:
            return
        self.script.go_on(Freeze(weights))

    @rule(counts=st.tuples(st.integers(0, 2), st.integers(0, 2)), divide_by_all=st.booleans())
    def join(self, counts, divide_by_all):
        script = self.script
        if script.ended or not self.alike or self.options["static_graph"]:
            return
        if script.pending or script.stray or script.hook_raised:
            return
        self.script.go_on(Freeze(()))
        self.script.go_on(Join(counts, divide_by_all))
        if not script.ended:
            self.script.go_on(Zero())


@pytest.mark.hypothesis  # `make explore` runs the tests that have this mark
@pytest.mark.timeout(3600)
def test_a_gradient_is_its_own_or_the_average_whatever_the_script_does(two_ranks, capsys):
    Scripts.ranks = two_ranks
    Scripts.seen = []
    run_state_machine_as_test(Scripts, settings=settings(examples(40), stateful_step_count=14))
    raised = sum(any(isinstance(step, Backward) and step.fault for step in one.steps) for one in Scripts.seen)
    with capsys.disabled():
        print(f"\n{len(Scripts.seen)} scripts, {raised} of them with an exception")
    assert raised  # about one script in ten; which ones, Hypothesis chooses anew after any change of the code


# Scripts that once gave wrong gradients or no error

USUAL = (Zero(), Forward((1.0, 50.0)), Backward())
NEXT = (Zero(), Forward((3.0, 70.0)), Backward())
MODES = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"hook": True},
]


def averages(ranks, options, *steps):
    """Run a script that raises no error; return the gradients of our class after its last step, by rank."""
    script = run(ranks, {"bucket_cap_mb": 1e-6} | options, *steps)
    assert not script.ended
    return script.gradients


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("faulty", [(0,), (1,), BOTH])
@pytest.mark.parametrize("in_place", [False, True])
def test_after_an_exception_that_follows_all_launches_the_next_average_is_right(two_ranks, options, faulty, in_place):
    fails = Backward(fault="input", ranks=faulty, late=True)
    steps = (*USUAL, Zero(in_place), Forward((1000.0, 5000.0)), fails, Zero(in_place), *NEXT)
    assert averages(two_ranks, options, *steps) == [[36.5] * 4] * 2


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("where", ["loss", "output"])
@pytest.mark.parametrize("first", [(), USUAL], ids=["first iteration", "later iteration"])
def test_after_an_exception_before_the_first_gradient_another_backward_pass_averages(
    two_ranks, options, where, first
):
    fails = Backward(fault=where, ranks=(1,), retry=True)
    assert averages(two_ranks, options, *first, Zero(), Forward((3.0, 70.0)), fails) == [[36.5] * 4] * 2


def test_a_collective_that_one_rank_has_left_behind_reaches_no_later_script(two_ranks):
    two_ranks.run(bodies.begin, {})
    two_ranks.run(bodies.leave_behind)
    assert averages(two_ranks, {}, *NEXT) == [[36.5] * 4] * 2


INTERRUPTED = (*USUAL, *USUAL, Zero(), Forward((1000.0, 5000.0)), Backward(fault="weight 0"), *NEXT)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_after_an_exception_before_the_first_launch_training_goes_on(two_ranks, options):
    assert averages(two_ranks, options | {"bucket_cap_mb": 25}, *INTERRUPTED) == [[36.5] * 4] * 2


@pytest.mark.parametrize("options", MODES, ids=str)
def test_an_exception_between_two_launches_is_named_by_the_next_forward_pass(two_ranks, options):
    """Each rank may have launched another number of buckets; a rank alone always trains on."""
    script = run(two_ranks, options | {"bucket_cap_mb": 1e-6}, *INTERRUPTED)
    assert "an exception ended the last backward pass (raised outside of the reducer" in script.ended
    assert "of 4 buckets had been launched" in script.ended
    assert "wrap the module again on every rank" in script.ended
    assert script.steps[-1] == NEXT[1]
    assert two_ranks.run(bodies.interrupted_alone) == [[3.0] * 4, [70.0] * 4]


def test_after_an_exception_before_the_first_gradient_the_backward_pass_of_another_graph_averages(two_ranks):
    steps = (Forward((1.0, 50.0)), Forward((3.0, 70.0)), Backward((-2,), fault="output"), Backward())
    assert averages(two_ranks, {}, *steps) == [[36.5] * 4] * 2


@pytest.mark.parametrize("options", MODES[:3], ids=str)
@pytest.mark.parametrize("of", [(-2,), (-1, -2)])
def test_a_forward_pass_under_no_sync_in_between_leaves_a_synchronised_one_waiting(two_ranks, options, of):
    """As in consistency losses: two forward passes, the second under `no_sync`, then one backward pass."""
    steps = (*USUAL, Zero(), Forward((3.0, 70.0)), Forward((5.0, 90.0), sync=False), Backward(of))
    assert averages(two_ranks, options, *steps) == [[36.5 if of == (-2,) else 84.0] * 4] * 2


def test_gradients_under_no_sync_do_not_count_as_those_of_a_static_graphs_first_iteration(two_ranks):
    first = (Forward((1.0, 50.0)), Forward((5.0, 90.0), sync=False), Backward((-1,), sync=False), Backward((-2,)))
    assert averages(two_ranks, {"static_graph": True}, *first, *NEXT) == [[36.5] * 4] * 2


FIRST = {
    "autograd.grad by the input": (Forward((1.0, 50.0)), Grad(by="input"), Backward()),
    "autograd.grad by the weights": (Forward((1.0, 50.0)), Grad(by="weights"), Backward()),
    "a frozen module, as of a GAN's discriminator": (Freeze(EVERY), Forward((1.0, 50.0)), Backward(), Freeze(())),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_static_graph_whose_first_backward_pass_accumulates_nothing_averages(two_ranks, first):
    assert averages(two_ranks, {"static_graph": True}, *FIRST[first], *NEXT) == [[36.5] * 4] * 2


def test_a_static_graph_with_some_parameters_frozen_in_the_first_pass_names_them_later(two_ranks):
    steps = (Freeze((1,)), Forward((1.0, 50.0)), Backward(), Freeze(()), *NEXT)
    assert "weights.1" in run(two_ranks, {"static_graph": True}, *steps).ended


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient(two_ranks, options):
    """Autograd calls the hook with a gradient, and accumulates none."""
    steps = (Forward((1.0, 50.0)), Freeze((0,)), Backward())
    assert averages(two_ranks, options, *steps) == [[0.0, *[25.5] * 3]] * 2


def test_ctrl_c_while_the_reducer_finishes_leaves_no_collective_in_flight(two_ranks):
    assert two_ranks.run(bodies.interrupted_while_finishing) == [[36.5] * 4] * 2
