"""Hypothesis strategies: random programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from .training_programs import MOST_PASSES, ROWS, Layout, Program, ProgramStep, StepKind, Weight

CAPS_MB = (1e-6, 3e-5, 1e-4, 3e-4, 25.0)
"""Bucket caps, from one parameter in each bucket to a single bucket."""
SHAPES: Sequence[tuple[int, ...]] = ((), (1,), (3,), (2, 2), (0,), (4, 3), (5, 2, 1), (2, 3, 2, 2))


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    world_size: int,
    *,
    kinds: Sequence[StepKind] = ("train", "train", "evaluate", "change_lr"),
    options: st.SearchStrategy[dict[str, Any]] | None = None,
    any_use: bool = False,
    static: bool = False,
    keep: bool = False,
    most_steps: int = 5,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> Program:
    """Draw a program; its last step trains, and at most `MOST_PASSES` steps do.

    `options` are arguments for the class, other than bucket caps. With `any_use`, forward may leave weights out; with
    `static`, each step uses the weights of the first step, in its order; with `keep`, gradients are cleared only
    after they were averaged. (torch's class fails if a script drops gradients accumulated under `no_sync`.)
    """
    weights = draw(_weights(shapes))
    count = len(weights)
    everything = st.permutations(range(count)).map(tuple)
    some = everything.flatmap(lambda order: st.integers(1, count).map(lambda length: tuple(order[:length])))
    some = some.map(lambda used: used if any(not weights[index].frozen for index in used) else (0, *used))
    use = some if any_use else everything
    used = [draw(st.tuples(*[use] * world_size)) for _ in range(1 if static else 5)]
    steps = st.builds(
        ProgramStep,
        kind=st.sampled_from(kinds),
        used=st.sampled_from(used),
        rows=st.tuples(*[st.integers(1, ROWS)] * world_size),
        zero=st.sampled_from(["none", "none", "zeros", "keep"]),
        optimize=st.sampled_from([True, True, False]),
        evaluation=st.sampled_from([False, False, True]),
    )
    drawn, accumulated = list[ProgramStep](), False
    for step in draw(st.lists(steps, min_size=2, max_size=most_steps)):
        drawn.append(replace(step, zero="keep") if keep and accumulated else step)
        accumulated = step.kind == "accumulate" or (accumulated and step.kind != "train")
        if [step.kind for step in drawn].count("train") == MOST_PASSES:
            break
    drawn[-1] = replace(drawn[-1], kind="train")
    given = {"bucket_cap_mb": draw(st.sampled_from(CAPS_MB))} | (draw(options) if options is not None else {})
    optimizer, seed = draw(st.sampled_from(["sgd", "adam"])), draw(st.integers(0, 999))
    return Program(weights, tuple(drawn), given, optimizer, seed=seed)


@st.composite
def _weights(draw: Callable[[st.SearchStrategy[Any]], Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Weight, ...]:
    """Draw weights of any shape, some frozen, some tied; the first one is neither."""
    depths = st.integers(0, 2)
    weights: list[Weight] = []
    for index in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["plain", "plain", "plain", "frozen", "tied"])) if index else "plain"
        if kind == "tied":
            tied_to = draw(st.sampled_from([number for number, one in enumerate(weights) if one.tied_to is None]))
            weights.append(replace(weights[tied_to], depth=draw(depths), tied_to=tied_to))
        else:
            shape = draw(st.sampled_from(shapes)) if index else (3,)
            dtype, depth = draw(st.sampled_from(["float32", "float32", "float64"])), draw(depths)
            layout = draw(st.sampled_from(get_args(Layout)))
            weights.append(Weight(shape, dtype, depth, frozen=kind == "frozen", layout=layout))
    return tuple(weights)
