"""Which parameter goes into which bucket, and when to rebuild: pure functions over ints.

The reducer and the simulator call the same functions, so predicted and real buckets cannot differ. The rule is that
of torch 2.13 (`torch.distributed._compute_bucket_assignment_by_size`), byte for byte. It is applied twice. At
construction it walks the parameters in registration order; the buckets are then reversed, because gradients become
ready roughly from the last layer to the first. After the first synchronised backward pass it walks in ready order.
"""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from heapq import heapreplace
from typing import Literal, get_args

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_MB = 1
ONE_BUCKET = 2**62
"""A cap in bytes that no bucket reaches."""

Order = Literal["ready", "reverse", "forward", "size", "ready_from_last"]
ORDERS: tuple[Order, ...] = get_args(Order)

Keys = Sequence[Hashable] | None
Sparse = Sequence[bool] | None
"""Of each parameter its dtype and device, and whether its gradient is sparse; see `assign_buckets`."""

BucketAssignment = list[list[int]]
"""Parameter indices by bucket. Where buckets are in *launch order*, bucket 0 is launched first."""


def assign_buckets(
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    keys: Keys = None,
    sparse: Sparse = None,
    order: Sequence[int] | None = None,
) -> BucketAssignment:
    """Assign parameters to buckets of at least the cap's size; a parameter is never split.

    A bucket closes when its size *reaches* its cap, so all but the last of each key have at least their cap.

    Args:
        sizes_bytes: Size of each parameter, by parameter index.
        caps_bytes: Cap of the first, second, ... bucket of each key; the last cap holds for all further buckets.
        keys: Key of each parameter, by parameter index: its dtype and device. Parameters in one bucket have equal
            keys. None: all keys are equal.
        sparse: Whether each parameter's gradient is sparse, by parameter index; such a parameter gets its own bucket.
        order: Parameter indices in the order in which to walk them. None: registration order, and the buckets are
            sorted by their smallest index, as torch does without a ready order.

    Returns:
        Parameter indices of each bucket. Buckets come in the order in which they closed; those still open at the end
        of the walk come last, in the order in which they were opened (in torch, in the order of a hash table).

    Raises:
        ValueError: Sizes, caps, keys, sparse or order are invalid or differ in length.
    """
    count = len(sizes_bytes)
    if not caps_bytes or not all(cap >= 0 for cap in caps_bytes):  # NaN is not
        raise ValueError(f"caps_bytes: expected at least one size, none negative, got {list(caps_bytes)}")
    if count and min(sizes_bytes) < 0:
        raise ValueError(f"sizes_bytes: expected no negative size, got {min(sizes_bytes)}")
    for name, values in (("keys", keys), ("sparse", sparse)):
        if values is not None and len(values) != count:
            raise ValueError(f"{name}: expected {count} entries, one for each parameter, got {len(values)}")
    if order is not None and len(set(order)) != len(order):
        raise ValueError("order: expected each parameter index once, one occurs twice")
    if unknown := sorted(set(order or ()) - set(range(count))):
        raise ValueError(f"order: expected parameter indices 0 to {count - 1}, got {unknown}")
    buckets: BucketAssignment = []
    open_buckets: dict[Hashable, list[int]] = {}
    missing_bytes: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    for index in range(count) if order is None else order:
        if sparse is not None and sparse[index]:
            buckets.append([index])
            continue
        key = None if keys is None else keys[index]
        if key not in open_buckets:
            open_buckets[key] = []
            missing_bytes[key] = caps_bytes[min(closed.get(key, 0), len(caps_bytes) - 1)]
        open_buckets[key].append(index)
        missing_bytes[key] -= sizes_bytes[index]
        if missing_bytes[key] <= 0:
            buckets.append(open_buckets.pop(key))
            closed[key] = closed.get(key, 0) + 1
    buckets.extend(open_buckets.values())
    return sorted(buckets, key=min) if order is None else buckets


def bucket_caps(bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """Convert the caps that a user gives in MiB to caps in bytes for `assign_buckets`.

    Args:
        bucket_cap_mb: Cap of all buckets, the first one included (torch 2.13); 0: each parameter gets its own bucket.
            None: 25 MiB, and 1 MiB for the first bucket, so that communication starts early.
        bucket_cap_mb_list: Cap of each bucket; overrides the other caps unless it is empty.

    Raises:
        ValueError: A cap is negative or not a number.
    """
    usual = [DEFAULT_FIRST_BUCKET_MB, DEFAULT_BUCKET_CAP_MB] if bucket_cap_mb is None else [bucket_cap_mb]
    caps_mb = list(bucket_cap_mb_list or usual)
    if not all(cap >= 0 for cap in caps_mb):  # also refuses NaN
        raise ValueError(f"bucket caps: expected sizes in MiB, none negative, got {caps_mb}")
    return [int(min(cap * MIB, float(ONE_BUCKET))) for cap in caps_mb]  # int(infinity) would raise


def may_change(*, find_unused_parameters: bool, static_graph: bool) -> bool:
    """Whether each iteration finds its own unused parameters; then one ready order does not predict the next."""
    return find_unused_parameters and not static_graph


def two_stage_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, *, graph_may_change: bool
) -> tuple[list[int], list[int]]:
    """Caps in bytes until the rebuild and after it: no limit until then, unless the user's caps hold from the start.

    Reversed registration order only approximates the ready order. Where it is wrong, an all-reduce could be launched
    between collectives that the backward pass itself issues, earlier on some ranks than on others. Therefore the
    first iteration has one bucket (torch 2.13). A `bucket_cap_mb_list` holds from the start, and so do all caps if
    there is no rebuild, because the graph may change. See `bucket_caps` for the other arguments.
    """
    caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
    return (caps if bucket_cap_mb_list or graph_may_change else [ONE_BUCKET]), caps


def cap_name(cap_mb: float) -> str:
    """A cap's name in tables and figures: "25 MB", or "single" for one bucket without a limit."""
    return "single" if math.isinf(cap_mb) else f"{cap_mb:g} MB"


def initial_buckets(
    sizes_bytes: Sequence[int], caps_bytes: Sequence[int], *, keys: Keys = None, sparse: Sparse = None
) -> BucketAssignment:
    """Buckets at construction, in launch order: assigned over registration order, then reversed."""
    return assign_buckets(sizes_bytes, caps_bytes, keys=keys, sparse=sparse)[::-1]


def rebuilt_buckets(
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    order: Sequence[int],
    keys: Keys = None,
    sparse: Sparse = None,
    small_last: bool = False,
) -> BucketAssignment:
    """Buckets of the rebuild, in launch order; see `assign_buckets` for the arguments.

    With `small_last` the caps count from the last bucket, which then has the first cap (in torch, with
    `DDP_SET_LAST_BUCKET_CAP=1`): it is walked in the opposite of ready order.
    """
    step = -1 if small_last else 1
    return assign_buckets(sizes_bytes, caps_bytes, keys=keys, sparse=sparse, order=order[::step])[::step]


def rebuild_order(ready_order: Sequence[int], count: int) -> list[int]:
    """Order in which the rebuild walks the parameters: in ready order, then those of a static graph never ready."""
    return [*ready_order, *sorted(set(range(count)) - set(ready_order))]


def plan_buckets(
    order: Order,
    sizes_bytes: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    ready_order: Sequence[int],
    keys: Keys = None,
    sparse: Sparse = None,
) -> BucketAssignment:
    """Assign parameters to buckets by walking them in a named order; returns the buckets in launch order.

    "ready" is `ready_order`, as at the rebuild; "reverse" and "forward" are registration order, reversed or not;
    "size" is the smallest parameter first, and among equals the one registered last; "ready_from_last" is
    `ready_order` from its end, see `small_last` of `rebuilt_buckets`. The other arguments are those of
    `assign_buckets`. Raises ValueError if `order` is not one of `ORDERS`.
    """
    registration = range(len(sizes_bytes))
    walks: dict[str, Callable[[], Sequence[int]]] = {
        "ready": lambda: ready_order,
        "reverse": lambda: registration[::-1],
        "forward": lambda: registration,
        "size": lambda: sorted(registration, key=lambda index: (sizes_bytes[index], -index)),
    }
    if order == "ready_from_last":
        return rebuilt_buckets(sizes_bytes, caps_bytes, order=ready_order, keys=keys, sparse=sparse, small_last=True)
    if order not in walks:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    return assign_buckets(sizes_bytes, caps_bytes, keys=keys, sparse=sparse, order=walks[order]())


def wrapped_modules(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of the modules that one call of FSDP2's `replicate()` wraps together with each parameter.

    As torchtitan wraps a decoder: each block alone, whose name ends in the first number, such as `layers.3`; the
    modules registered after the last block together, such as `norm` and `output`; and the root for the rest, such as
    embeddings, as an empty tuple. (torchtitan wraps embeddings alone. They too are averaged after the backward pass.)
    `names` are by parameter index. Raises ValueError if no name has a number, so the names don't show the blocks.
    """
    parts = [re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name) for name in names]
    numbered = [index for index, found in enumerate(parts) if found]
    if not numbered:
        raise ValueError(
            "grouping: expected names of parameters that show the blocks of the model by numbers, such as "
            f"layers.3.attention.weight, got {', '.join(names[:3])}; give the buckets as a plan"
        )
    owners = [name.rpartition(".")[0] for name in names]
    after = tuple(dict.fromkeys(filter(None, owners[numbered[-1] + 1 :])))
    return [
        (found[0],) if found else (after if index > numbered[-1] and owners[index] else ())
        for index, found in enumerate(parts)
    ]


def module_buckets(names: Sequence[str], ready_order: Sequence[int]) -> BucketAssignment:
    """Buckets of FSDP2's `replicate()`, one for each call on `wrapped_modules`, in launch order.

    A module is averaged when its backward pass is done, and the root after that of all others. If the root has no
    parameters, the last one is the module that comes first in the forward pass. Errors: `wrapped_modules`.
    """
    modules = wrapped_modules(names)
    place = {index: number for number, index in enumerate(ready_order)}
    buckets: dict[tuple[str, ...], list[int]] = {}
    for index, module in enumerate(modules):
        buckets.setdefault(module, []).append(index)
    return sorted(
        buckets.values(), key=lambda bucket: (not modules[bucket[0]], max(place.get(index, -1) for index in bucket))
    )


def optimizer_shards(elements: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the parameters that each rank updates under torch's ZeroRedundancyOptimizer, by rank.

    The parameter with the most elements first, each goes to the rank with the fewest so far; of equals, the first.
    """
    shards: list[list[int]] = [[] for _ in range(ranks)]
    fewest = [(0, rank) for rank in range(ranks)]  # a heap
    for index in sorted(range(len(elements)), key=elements.__getitem__, reverse=True):
        own, rank = fewest[0]
        shards[rank].append(index)
        heapreplace(fewest, (own + elements[index], rank))
    return shards


def check_partition(buckets: Sequence[Sequence[int]], count: int, *, name: str = "buckets") -> None:
    """Raise a ValueError about `name` unless each index in range(count) is in exactly one non-empty bucket."""
    seen = [index for bucket in buckets for index in bucket]
    if not all(buckets):
        raise ValueError(f"{name}: bucket {[bool(b) for b in buckets].index(False)} is empty")
    if unknown := sorted(set(seen) - set(range(count))):
        raise ValueError(f"{name}: expected parameter indices 0 to {count - 1}, got {unknown}")
    if twice := sorted(index for index, times in Counter(seen).items() if times > 1):
        raise ValueError(f"{name}: parameters {twice} are in more than one bucket")
    if missing := sorted(set(range(count)) - set(seen)):
        raise ValueError(f"{name}: parameters {reprlib.repr(missing)} are in no bucket, of {count}")
