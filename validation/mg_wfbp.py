"""Merging: which gradients MG-WFBP sends together (Shi, Chu and Li, INFOCOM 2019; arXiv 1811.11141)."""

from collections.abc import Sequence


def merged_plan(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    ready_ns: Sequence[int],
    *,
    start_up_ns: float,
    ns_per_byte: float,
    below_bytes: int,
) -> list[list[int]]:
    """Groups of parameters in launch order.

    A group takes the next gradient too if waiting for it costs less than a start-up saves, and if its own all-reduce
    would still run by then; a group of fewer than `below_bytes` always does. An all-reduce is taken to cost
    `start_up_ns + ns_per_byte * size`.

    Args:
        order: Parameter indices as their gradients become ready; at least one.
        sizes_bytes: By parameter index.
        ready_ns: By parameter index.
        start_up_ns: What the job took an all-reduce's start-up to be.
        ns_per_byte: The same of a byte.
        below_bytes: See above.
    """
    plan: list[list[int]] = [[]]
    size, free_ns = 0, 0.0
    for place, index in enumerate(order):
        plan[-1].append(index)
        size += sizes_bytes[index]
        if place + 1 == len(order):
            break
        start_ns = max(free_ns, ready_ns[index])
        end_ns = start_ns + start_up_ns + ns_per_byte * size
        next_ns = ready_ns[order[place + 1]]
        if size >= below_bytes and not (next_ns < end_ns and next_ns - start_ns < start_up_ns):
            plan.append([])
            size, free_ns = 0, end_ns
    return plan
