"""Measured utilisation: which part of a data sheet's rates published training steps reach, and what that predicts.

The roofline with efficiencies: operations of one kind take their FLOPs at a part of the peak rate or their bytes at a
part of the bandwidth, whichever is longer, and a step takes at least as long as its host launches. The logarithm of
an efficiency is a sum of terms, such as the kind's and the generation's. All terms are fitted at once, each drawn to
its prior (ridge regression), so that an unknown combination falls back to its kind.

`python -m validation.measured_utilisation` prints the utilisations, the efficiencies, and how well steps are
predicted whose model, family, device or generation is left out of the fit. With `--write` it also writes the file of
measured ceilings, from which `ddplab plan` and `synthesize` predict.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from ddplab.reference.files.writing import write_atomically
from ddplab.simulator.workload.compute_times import Floats
from ddplab.simulator.workload.roofline import CEILINGS_FILE, Unmeasured

from .published_steps import Step, read, read_steps

NOISE = 0.12
"""Relative error of a step against which the priors count."""
PRIORS = dict.fromkeys(("conv", "grouped", "depthwise", "matmul", "attention"), 0.55) | {"memory": 0.7}
"""Efficiency of each kind's arithmetic, and of the memory, before any measurement; other terms change nothing."""
LEFT_OUT: tuple[Unmeasured, ...] = get_args(Unmeasured)
SPREAD, WIDE_SPREAD = 0.3, 0.7
"""Standard deviation of the logarithm of a term, and of one with a prior or of a setting's."""


class Efficiencies:
    """Terms of the efficiencies, as logarithms by name."""

    def __init__(self, steps: Sequence[Step], start: "Efficiencies | None" = None) -> None:
        """Fit by Gauss-Newton; the n steps of a cell count as much as the root of n, and outliers less (Huber).

        Args:
            steps: Published steps.
            start: A fit of similar steps, from which few rounds suffice.
        """
        parts = [part for step in steps for part in step.parts]
        names = sorted({term for part in parts for term in (*part.arithmetic, *part.memory)})
        prior = np.log([PRIORS.get(name, 1.0) for name in names])
        wide = np.array([name in PRIORS or "fused" in name or "contiguous" in name for name in names])
        weight = np.where(wide, WIDE_SPREAD, SPREAD) ** -2.0
        cells = Counter(step.cell for step in steps)
        certainty = np.array([cells[step.cell] ** -0.5 for step in steps]) / NOISE
        ms, host_ms = (np.array([getattr(step, name) for step in steps]) for name in ("ms", "host_ms"))
        owner = np.repeat(np.arange(len(steps)), [len(step.parts) for step in steps])
        arithmetic, memory = (_design(names, [getattr(p, side) for p in parts]) for side in ("arithmetic", "memory"))
        at_peak, at_bandwidth = (
            np.array([getattr(p, f"{side}_ms") for p in parts]) for side in ("arithmetic", "memory")
        )
        logs = prior if start is None else np.array([start.logs.get(name, 0.0) for name in names])
        for _ in range(25 if start is None else 6):
            times = at_peak * np.exp(-arithmetic @ logs), at_bandwidth * np.exp(-memory @ logs)
            longer = np.maximum(*times)
            gpu_ms, slope = np.bincount(owner, longer), np.zeros((len(steps), len(names)))
            np.add.at(slope, owner, -longer[:, None] * np.where((times[0] >= times[1])[:, None], arithmetic, memory))
            slope *= (gpu_ms > host_ms)[:, None] / gpu_ms[:, None]
            error = np.log(np.maximum(gpu_ms, host_ms) / ms)
            scale = certainty * np.sqrt(np.minimum(1, 1.5 / np.maximum(certainty * np.abs(error), 1e-9)))
            scaled = slope * scale[:, None]
            gradient = scaled.T @ (error * scale) + (logs - prior) * weight
            logs = logs - np.clip(np.linalg.solve(scaled.T @ scaled + np.diag(weight), gradient), -0.5, 0.5)
        self.logs: dict[str, float] = dict(zip(names, logs.tolist(), strict=True))

    def of(self, terms: Sequence[str]) -> float:
        """Return the efficiency with these terms; those that no step has change nothing."""
        return float(np.exp(sum(self.logs.get(term, 0.0) for term in terms)))

    def predict_ms(self, step: Step) -> float:
        """Return the milliseconds of a step, of which the published time is not used."""
        gpu_ms = sum(
            max(part.arithmetic_ms / self.of(part.arithmetic), part.memory_ms / self.of(part.memory))
            for part in step.parts
        )
        return max(gpu_ms, step.host_ms)


def _design(names: Sequence[str], terms: Sequence[Sequence[str]]) -> Floats:
    place, design = {name: column for column, name in enumerate(names)}, np.zeros((len(terms), len(names)))
    for row, some in zip(design, terms, strict=True):
        row[[place[term] for term in some]] = 1
    return design


class LeftOut(NamedTuple):
    """How well steps are predicted without their group; each cell counts once.

    Attributes:
        groups: Number of groups.
        inside: Part of the cells within the half-width that the errors of the other groups give at 90 %.
        half_width: That half-width, the median over the groups; an error of +30 % and one of 1/1.3 are 0.3.
        median_error: Median of the errors.
    """

    groups: int
    inside: float
    half_width: float
    median_error: float


def leave_out(steps: Sequence[Step], by: Unmeasured) -> LeftOut:
    """Fit without each group of steps in turn, and predict its steps."""
    whole, names = Efficiencies(steps), np.array([str(getattr(step, by)) for step in steps])
    errors, groups, cells = np.zeros(len(steps)), sorted(set(names)), Counter(step.cell for step in steps)
    weights = np.array([1 / cells[step.cell] for step in steps])
    for group in groups:
        fitted = Efficiencies([step for step in steps if getattr(step, by) != group], whole)
        for index, step in enumerate(steps):
            if names[index] == group:
                errors[index] = abs(np.log(fitted.predict_ms(step) / step.ms))
    limits = {group: _quantile(errors[names != group], weights[names != group], 0.9) for group in groups}
    inside = weights @ (errors <= np.array([limits[name] for name in names])) / weights.sum()
    half_width, median_error = np.median(list(limits.values())), _quantile(errors, weights, 0.5)
    return LeftOut(len(groups), float(inside), float(np.expm1(half_width)), float(np.expm1(median_error)))


def _quantile(values: Floats, weights: Floats, part: float) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), part * weights.sum())])


def ceilings(fitted: Efficiencies, steps: Sequence[Step], errors: dict[Unmeasured, LeftOut]) -> dict[str, Any]:
    """Return the fields of `MeasuredCeilings`; numbers have three digits."""
    families = defaultdict[str, set[int]](set)
    for step in steps:
        families[step.family].add(step.parameters)
    return {
        "steps": len(steps),
        "logs": {name: round(value, 3) for name, value in sorted(fitted.logs.items())},
        "generations": {row["name"]: row["generation"] for row in read("devices")},
        "families": {name: sorted(counts) for name, counts in sorted(families.items())},
        "errors": {by: round(left.half_width, 3) for by, left in errors.items()},
    }


def main() -> None:
    """Print the utilisations, the efficiencies and the errors of what is left out; write the ceilings if asked to."""
    steps = read_steps()
    fitted, table = Efficiencies(steps), defaultdict[tuple[str, ...], list[float]](list)
    for step in steps:
        table["peak rate reached", step.family, step.generation, step.precision].append(step.utilisation)
        error = fitted.predict_ms(step) / step.ms  # shared by all parts of the step
        for part in {part.kind: part for part in step.parts}.values():
            for side, terms in ("arithmetic", part.arithmetic), ("memory", part.memory):
                if PRIORS.keys() & set(terms):
                    key = f"{side} efficiency", part.kind, step.generation, step.precision
                    table[key].append(fitted.of(terms) * error)
    print("median, 10 % to 90 %, steps")
    for row, values in sorted(table.items()):
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        print(f"{', '.join(row):60} {middle:5.2f}  {low:5.2f} to {high:5.2f} {len(values):5}")
    print(f"\n{len(steps)} steps, {len(fitted.logs)} terms. Left out of the fit:")
    errors = {by: leave_out(steps, by) for by in LEFT_OUT}
    for by, left in errors.items():
        print(
            f"{by} ({left.groups}): {left.inside:.0%} inside, half-width {left.half_width:.0%} at 90 %, "
            f"median error {left.median_error:.0%}"
        )
    if sys.argv[1:] == ["--write"]:
        write_atomically(CEILINGS_FILE, (json.dumps(ceilings(fitted, steps, errors), indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
