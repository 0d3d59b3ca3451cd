"""Which parameter goes into which bucket, and when to rebuild: pure functions over ints.

The reducer and the simulator both call these, so a prediction cannot differ from the real thing by a rule.
The rule is torch 2.13's (`torch.distributed._compute_bucket_assignment_by_size`), byte for byte. It is
applied twice: at construction over registration order, the list of buckets then reversed, because gradients
become ready roughly last layer first; and once more, after the first synchronised backward pass, over the
order in which the gradients really became ready.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, get_args

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_MB = 1
ONE_BUCKET = 2**62
"""A cap in bytes that nothing reaches."""

Order = Literal["ready", "reverse", "forward", "size", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)

BucketAssignment = list[list[int]]
"""Parameter indices by bucket; where it says *launch order*, bucket 0 goes first."""


def assign_buckets(
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    keys: Sequence[Hashable] | None = None,
    sparse: Sequence[bool] | None = None,
    order: Sequence[int] | None = None,
) -> BucketAssignment:
    """Assign parameters to buckets of at least the cap's size, without ever splitting a parameter.

    A bucket closes when its size *reaches* its cap, so a cap is a lower bound on all buckets but the last.

    Args:
        sizes_bytes: Size of each parameter, by parameter index.
        caps_bytes: Cap of the first, second, ... bucket of each key; the last cap holds for all that follow.
        keys: What parameters of one bucket must share, by parameter index: dtype and device. None: all alike.
        sparse: Whether a parameter's gradient is sparse, by parameter index; such a one gets its own bucket.
        order: Parameter indices in the order to walk them. None: registration order, and the buckets are
            sorted by their smallest index, as torch does where it has no ready order.

    Returns:
        Parameter indices of each bucket, in walking order. Buckets still open at the end of the walk come
        last, the one opened first before the others (torch leaves that order to a hash table).

    Raises:
        ValueError: Sizes, caps, keys, sparse or order that do not fit together.
    """
    _check_assignment(sizes_bytes, caps_bytes, keys, sparse, order)
    buckets: BucketAssignment = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    for index in range(len(sizes_bytes)) if order is None else order:
        if sparse is not None and sparse[index]:
            buckets.append([index])
            continue
        key = None if keys is None else keys[index]
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + sizes_bytes[index]
        if open_bytes[key] >= caps_bytes[min(closed.get(key, 0), len(caps_bytes) - 1)]:
            buckets.append(open_buckets.pop(key))
            del open_bytes[key]
            closed[key] = closed.get(key, 0) + 1
    buckets.extend(open_buckets.values())
    return sorted(buckets, key=min) if order is None else buckets


def bucket_caps(bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """Caps in bytes for `assign_buckets`, from what a user says in MiB.

    None means 25 MiB with a first bucket of 1 MiB, so that communication starts early; a cap given by the
    user holds for the first bucket too (torch 2.13). A list gives one cap a bucket and overrides the single cap.

    Raises:
        ValueError: A cap that is not a positive number, or an empty list.
    """
    if bucket_cap_mb_list is not None:
        caps_mb = list(bucket_cap_mb_list)
    elif bucket_cap_mb is not None:
        caps_mb = [bucket_cap_mb]
    else:
        caps_mb = [DEFAULT_FIRST_BUCKET_MB, DEFAULT_BUCKET_CAP_MB]
    if not caps_mb or not all(cap > 0 for cap in caps_mb):
        raise ValueError(f"bucket caps: expected positive sizes in MiB, got {caps_mb}")
    return [int(min(cap * MIB, float(ONE_BUCKET))) for cap in caps_mb]  # infinity is no int


def first_iteration_caps(caps_bytes: Sequence[int], *, listed: bool, graph_may_change: bool) -> list[int]:
    """Caps in force until the rebuild, from those that the user's wishes come to.

    Registration order is a guess at the order in which gradients become ready. Where it is wrong an all-reduce
    may be launched between collectives that the backward pass itself issues, on some ranks earlier than on
    others; so the first iteration has one bucket. Without a rebuild (the graph may change), or with caps that
    the user listed one by one, they hold from the start. (torch 2.13)
    """
    return list(caps_bytes) if listed or graph_may_change else [ONE_BUCKET]


def cap_name(cap_mb: float) -> str:
    """What a cap is called in tables and figures: "25 MB", or "single" for one bucket without a limit."""
    return "single" if math.isinf(cap_mb) else f"{cap_mb:g} MB"


def initial_buckets(
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    keys: Sequence[Hashable] | None = None,
    sparse: Sequence[bool] | None = None,
) -> BucketAssignment:
    """Buckets at construction, in launch order: assigned over registration order, then reversed."""
    return assign_buckets(sizes_bytes, caps_bytes, keys=keys, sparse=sparse)[::-1]


def plan_buckets(
    order: Order,
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    ready_order: Sequence[int],
    keys: Sequence[Hashable] | None = None,
    sparse: Sequence[bool] | None = None,
    seed: int = 0,
) -> BucketAssignment:
    """Buckets in launch order when parameters are walked in a named order, the small first bucket first.

    Args:
        order: "ready", what the rebuild does; "reverse" or "forward" of registration order; "size", the smallest
            first, of equals the one registered last; "random", which a seed decides.
        sizes_bytes: Size of each parameter, by parameter index.
        caps_bytes: As for `assign_buckets`.
        ready_order: Parameter indices as their gradients became ready; used where `order` is "ready".
        keys: As for `assign_buckets`.
        sparse: As for `assign_buckets`.
        seed: Of the order "random".

    Raises:
        ValueError: An order that has no such name.
    """
    registration = range(len(sizes_bytes))
    walks: dict[str, Callable[[], Sequence[int]]] = {
        "ready": lambda: ready_order,
        "reverse": lambda: registration[::-1],
        "forward": lambda: registration,
        "size": lambda: sorted(registration, key=lambda index: (sizes_bytes[index], -index)),
        "random": lambda: random.Random(seed).sample(registration, len(registration)),
    }
    if order not in walks:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    return assign_buckets(sizes_bytes, caps_bytes, keys=keys, sparse=sparse, order=walks[order]())


def should_rebuild(*, rebuilt: bool, fixed: bool, has_ready_order: bool) -> bool:
    """Tell whether the coming forward pass rebuilds: once, as soon as a backward pass has told the ready order.

    Fixed buckets stay: those of an explicit plan, and those of a graph that may change (torch: with
    `find_unused_parameters`, unless the graph is said to be static).
    """
    return has_ready_order and not rebuilt and not fixed


def check_partition(buckets: Sequence[Sequence[int]], count: int, *, name: str = "buckets") -> None:
    """Raise ValueError, about `name`, unless every index in range(count) lies in exactly one non-empty bucket."""
    seen = [index for bucket in buckets for index in bucket]
    if not all(buckets):
        raise ValueError(f"{name}: bucket {[bool(b) for b in buckets].index(False)} is empty")
    if unknown := sorted(set(seen) - set(range(count))):
        raise ValueError(f"{name}: expected parameter indices 0 to {count - 1}, got {unknown}")
    if twice := sorted(index for index, times in Counter(seen).items() if times > 1):
        raise ValueError(f"{name}: parameters {twice} are in more than one bucket")
    if missing := sorted(set(range(count)) - set(seen)):
        raise ValueError(f"{name}: parameters {missing} are in no bucket")


def _check_assignment(
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    keys: Sequence[Hashable] | None,
    sparse: Sequence[bool] | None,
    order: Sequence[int] | None,
) -> None:
    count = len(sizes_bytes)
    if not caps_bytes or min(caps_bytes) < 0:
        raise ValueError(f"caps_bytes: expected at least one size, none negative, got {list(caps_bytes)}")
    if count and min(sizes_bytes) < 0:
        raise ValueError(f"sizes_bytes: expected no negative size, got {min(sizes_bytes)}")
    for name, values in (("keys", keys), ("sparse", sparse)):
        if values is not None and len(values) != count:
            raise ValueError(f"{name}: expected {count} entries, one a parameter, got {len(values)}")
    if order is not None:
        if len(set(order)) != len(order):
            raise ValueError("order: a parameter index occurs twice")
        if unknown := sorted(set(order) - set(range(count))):
            raise ValueError(f"order: expected parameter indices 0 to {count - 1}, got {unknown}")
