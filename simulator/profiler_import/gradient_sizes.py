"""Which gradients a training step has, how large they are, and which bucket each belongs to.

A file of the profiler holds little of this: shapes only if they were recorded, buckets only as numbers of bytes.
Everything else is derived, and each derivation is a sentence in the result.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, compress
from math import prod
from typing import NamedTuple

from ...reference.trace import Parameter
from .training_steps import ELEMENT_BYTES, AccumulatedGradient, ProfiledStep

MOST_CANDIDATES = 300
"""Most gradients of which pairs are tried; of triples half as many."""
MOST_MISPLACED = 3
"""Most gradients that became ready before a bucket was launched and belong to a later one."""
DTYPES = {
    **dict.fromkeys(("float", "float32"), "float32"),
    **dict.fromkeys(("double", "float64"), "float64"),
    **dict.fromkeys(("half", "c10::half", "float16"), "float16"),
    **dict.fromkeys(("bfloat16", "c10::bfloat16"), "bfloat16"),
}
"""Names of element types as torch writes them, by those in the file in lower case."""
DEFAULT_DTYPE = "float32"


class ModelGradients(NamedTuple):
    """The gradients of a model as a file shows them."""

    parameters: tuple[Parameter, ...]
    """By parameter index: in the reverse of the order in which the gradients of the last step became ready, or as the
    given model defines them."""
    places: tuple[int, ...]
    """Place of each parameter's gradient among the gradients of the last step, by parameter index."""
    buckets: tuple[tuple[int, ...], ...]
    """Parameter indices by bucket, in launch order; empty if there are no buckets or they are unknown."""
    derived: tuple[str, ...]  #: how values were derived that are not in the file; one sentence each


def model_gradients(steps: Sequence[ProfiledStep], given: Sequence[Parameter] | None = None) -> ModelGradients:
    """Return the gradients of the model that was trained in these steps, which have equal gradients and buckets.

    `given` and the errors are those of `import_profile`.
    """
    derived: list[str] = []
    last = steps[-1]
    count = last.buckets[-1].gradients if last.buckets else len(last.gradients)
    if outside := len(last.gradients) - count:
        derived.append(f"{outside} gradients were accumulated after the last bucket; they count as computation")
    gradients = last.gradients[:count]
    sizes, dtypes = _sizes(last, gradients, derived)
    if given is None:
        indices = list(reversed(range(count)))
        parameters = _unnamed(gradients, sizes, dtypes, derived)
    else:
        indices = _match(gradients, sizes, given)
        parameters = tuple(given)
        if None in sizes:
            derived.append("sizes of gradients: those of the given model, in the reverse of its registration order")
    in_order = [parameters[index] for index in indices]
    buckets = _buckets(last, [one.size_bytes for one in in_order], [one.dtype for one in in_order], derived)
    return ModelGradients(
        parameters=parameters,
        places=tuple(sorted(range(count), key=indices.__getitem__)),
        buckets=tuple(tuple(indices[place] for place in bucket) for bucket in buckets),
        derived=tuple(derived),
    )


def _sizes(
    last: ProfiledStep, gradients: Sequence[AccumulatedGradient], derived: list[str]
) -> tuple[list[int | None], list[str]]:
    """Return bytes and element type of each gradient of the last step, in the order of accumulation."""
    noted = {one.dtype for one in last.buckets or last.all_reduces} - {None}
    usual = DTYPES.get(str(noted.pop()).lower(), DEFAULT_DTYPE) if len(noted) == 1 else DEFAULT_DTYPE
    names = [(one.dtype or "").lower() for one in gradients]
    dtypes = [DTYPES.get(name, usual) for name in names]
    sizes = [
        None if one.shape is None else prod(one.shape) * ELEMENT_BYTES.get(name, ELEMENT_BYTES[usual])
        for one, name in zip(gradients, names, strict=True)
    ]
    copied = [copy.size_bytes for copy in last.copies]
    are_in_copies = None in sizes and len(copied) == len(sizes) and None not in copied
    if are_in_copies and _fits(last, [size or 0 for size in copied]):
        derived.append("sizes of gradients: bytes of the copies out of the buckets, which come in the same order")
        return list(copied), dtypes
    return sizes, dtypes


def _fits(last: ProfiledStep, sizes: Sequence[int]) -> bool:
    """Return whether the gradients accumulated up to each bucket's launch have the bytes of these buckets."""
    launched = [(one.gradients, one.size_bytes) for one in last.buckets if one.size_bytes is not None]
    sent = accumulate(size for _, size in launched)
    return all(sum(sizes[:count]) == total for (count, _), total in zip(launched, sent, strict=True))


def shapeless_outside_buckets(last: ProfiledStep) -> int:
    """Return how many gradients of a step have no shape, if the others have the bytes of its buckets; else 0.

    In a plain module, which has no buckets, sparse gradients have no shape.
    """
    sizes, _ = _sizes(last, last.gradients, [])
    unknown = sum(size is None for size in sizes)
    return unknown if unknown < len(sizes) and _fits(last, [size or 0 for size in sizes]) else 0


def with_shapes(step: ProfiledStep) -> ProfiledStep:
    """Return a step without its gradients that have no shape."""
    known = [gradient.shape is not None for gradient in step.gradients]
    return replace(
        step,
        gradients=tuple(compress(step.gradients, known)),
        all_reduces=tuple(one._replace(gradients=sum(known[: one.gradients])) for one in step.all_reduces),
    )


def _unnamed(
    gradients: Sequence[AccumulatedGradient], sizes: Sequence[int | None], dtypes: Sequence[str], derived: list[str]
) -> tuple[Parameter, ...]:
    if None in sizes:
        if unknown := sum(size is None for size in sizes) % len(sizes):
            raise ValueError(f"{unknown} of {len(sizes)} gradients have no shape, as sparse ones; give --model")
        raise ValueError(
            "the sizes of the gradients are neither in the file nor follow from it; profile with record_shapes=True, "
            "or give the model with --model"
        )
    derived.append(
        "names of parameters are unknown without --model; they are numbered in reverse gradient-ready order"
    )
    parameters: list[Parameter] = []
    for gradient, size, dtype in zip(gradients, sizes, dtypes, strict=True):
        size_bytes = size or 0
        if size_bytes % ELEMENT_BYTES[dtype]:
            dtype = "int8"
        shape = gradient.shape if gradient.shape is not None else (size_bytes // ELEMENT_BYTES[dtype],)
        name = f"parameter {len(gradients) - 1 - len(parameters)}"
        parameters.append(Parameter(name=name, shape=shape, dtype=dtype, size_bytes=size_bytes))
    return tuple(reversed(parameters))


def _match(
    gradients: Sequence[AccumulatedGradient], sizes: Sequence[int | None], given: Sequence[Parameter]
) -> list[int]:
    """Return the parameter index of each gradient.

    Gradients of equal size belong to the parameters of this size in the reverse of the registration order.
    """
    if len(given) != len(gradients):
        expected = f"expected a model with {len(gradients)} trainable parameters, as many as the file has gradients"
        raise ValueError(f"--model: {expected}, got {len(given)}")
    left = list(reversed(range(len(given))))
    indices = []
    for place, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
        fitting = (
            index
            for index in left
            if size in (None, given[index].size_bytes) and gradient.shape in (None, given[index].shape)
        )
        if (index := next(fitting, None)) is None:
            expected = f"expected a parameter of {size} bytes for gradient {place} of the file, got none that is left"
            raise ValueError(f"--model: {expected}; give the model that was profiled")
        left.remove(index)
        indices.append(index)
    return indices


def _buckets(last: ProfiledStep, sizes: Sequence[int], dtypes: Sequence[str], derived: list[str]) -> list[list[int]]:
    """Return the places of the gradients in each bucket; empty if the bytes of the buckets do not fit.

    A bucket holds gradients of one element type and is launched when its last gradient is ready. If those that were
    ready by then have more bytes, some belong to a later bucket; of several that fit, those that were ready last.
    """
    buckets, waiting, moved, accumulated = list[list[int]](), list[int](), list[str](), 0
    for number, one in enumerate(last.buckets):
        waiting += range(accumulated, one.gradients)
        accumulated = one.gradients
        dtype = DTYPES.get((one.dtype or "").lower(), one.dtype)
        alike = [place for place in waiting if dtypes[place] == dtype] or waiting  # its element type may be unknown
        later: tuple[int, ...] | None = ()
        if one.size_bytes is not None:
            later = _with_sum(alike[:-1][::-1], sizes, sum(sizes[place] for place in alike) - one.size_bytes)
        if later is None:
            derived.append(
                f"bucket {number} has {one.size_bytes} bytes, to which no gradients that were ready add up, as with "
                "a comm hook that compresses, or with unused or sparse gradients; the trace has no buckets"
            )
            return []
        if later:
            moved.append(
                f"bucket {number} has fewer bytes than the gradients that were ready when it was launched; "
                f"{len(later)} of them count to a later bucket, of those of equal size the last ones"
            )
        members = [place for place in alike if place not in later]
        buckets.append(members)
        waiting = [place for place in waiting if place not in members]
    if waiting:
        why = "as with a comm hook that compresses"
        derived.append(f"{len(waiting)} gradients are in no bucket, by its bytes, {why}; the trace has no buckets")
        return []
    derived += moved
    return buckets


def _with_sum(places: Sequence[int], sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Return the fewest of these places whose sizes add up to `total`, the first ones if there are several."""
    if total < 0:
        return None
    candidates = [place for place in places if sizes[place] <= total]
    for count in range(MOST_MISPLACED + 1):
        if count > 1:
            candidates = candidates[: MOST_CANDIDATES // count]
        for some in combinations(candidates, count):
            if sum(sizes[place] for place in some) == total:
                return some
    return None
