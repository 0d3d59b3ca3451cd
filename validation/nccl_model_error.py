"""How far NCCL's own cost model is from published all-reduces: the figures of `MULTIPLES` in the simulator.

Also how often published times lie in the error band where a table that was cut off is continued, by described links
or by its own lines.

    python -m validation.nccl_model_error

The rate of each system and number of GPUs is that of its fastest published message, so that only the shape is
compared. Sources: Alps is boeschf/nccl-benchmark-on-alps-2025 (fastest of ten configurations), Azure ND A100 v4
NetX-lab/Echo, vTrain VIA-Research/vTrain; the others are logs of nccl-tests that providers and users published.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import log
from pathlib import Path

import numpy as np
import pandas as pd

from ddplab.simulator.fabric import Fabric, Level, Topology
from ddplab.simulator.fabric.algorithms import MULTIPLES, nccl_all_reduce

DATA = Path(__file__).parent / "data" / "nccl_all_reduces.csv"
NVLINK_GB_PER_S = {"V100": 134.5, "A100": 230.9, "H100": 340.0, "GH200": 340.0}
"""Bus bandwidth inside a node; it tells the model the generation where only several nodes were measured."""
LEAST_GPUS = 4
"""Two and three GPUs of one node are left out, because of their direct links."""

Logarithms = Mapping[str, Mapping[int, list[float]]]
"""Logarithms of measured over modelled times, by system and size."""


def tables(*, several_nodes: bool) -> Iterator[tuple[str, pd.DataFrame, list[Level]]]:
    """Yield the published tables: the system, the rows of one number of GPUs, and the links."""
    for _, rows in pd.read_csv(DATA).groupby(["system", "gpus"]):
        system, gpu, gpus, per_node = rows[["system", "gpu", "gpus", "gpus_per_node"]].values.tolist()[0]
        nodes = max(1, gpus // per_node)
        if (nodes > 1) != several_nodes or gpus < LEAST_GPUS:
            continue
        rate = (2 * (gpus - 1) / gpus * rows["bytes"] / rows["us"]).max() * 1e6
        inside = rate if nodes == 1 else max(rate, 1e9 * NVLINK_GB_PER_S[gpu])
        links = (("nvlink", gpus // nodes, 3_400, inside), ("network", nodes, 14_000, rate))
        levels = [
            Level(name=name, members=members, latency_ns=latency_ns, bytes_per_s=bytes_per_s)
            for name, members, latency_ns, bytes_per_s in links
        ]
        yield system, rows, levels


def logarithms(*, several_nodes: bool) -> Logarithms:
    """Return the logarithms of measured over modelled times of all systems, for messages of powers of two."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for system, rows, levels in tables(several_nodes=several_nodes):
        costs = [cost.costs_ns(rows["bytes"].to_numpy()) for cost in nccl_all_reduce(levels).values()]
        for size, us, ns in zip(rows["bytes"], rows["us"], np.min(costs, axis=0), strict=True):
            found[system][int(size)].append(log(us * 1e3 / ns))
    return found


def multiples(found: Logarithms, sizes_bytes: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return mean and deviation between systems, of which each has the same weight, at these sizes."""
    by_size = {}
    for size in sizes_bytes:
        systems = [np.mean(of_size[size]) for of_size in found.values() if size in of_size]
        by_size[size] = float(np.exp(np.mean(systems))), float(np.std(systems, ddof=len(systems) > 1))
    return by_size


def covered(*, several_nodes: bool, linked: bool) -> float:
    """Return the part of the published times in the error band, at the sizes that are cut off, over all cuts.

    Args:
        several_nodes: Tables of several nodes, or of one.
        linked: The links are described.
    """
    inside: list[bool] = []
    for _, rows, levels in tables(several_nodes=several_nodes):
        gpus = int(rows["gpus"].iloc[0])
        medians = 1e3 * rows.groupby("bytes")["us"].median()
        sizes, ns = medians.index.to_numpy(), medians.to_numpy()
        for cut in range(1, len(sizes) - 1):
            for kept in (slice(cut, None), slice(0, cut + 1)):
                pairs = zip(sizes[kept].tolist(), ns[kept].tolist(), strict=True)
                table = Fabric.from_table((gpus, size, round(time)) for size, time in pairs)
                fabric = table.model_copy(update={"topology": Topology(levels=tuple(levels)) if linked else None})
                beyond = np.delete(np.arange(len(sizes)), kept)
                costs_ns = fabric.all_reduce_costs_ns(sizes[beyond], gpus)
                band = 1 + fabric.relative_errors(sizes[beyond], gpus)
                inside += ((costs_ns / band <= ns[beyond]) & (ns[beyond] <= costs_ns * band)).tolist()
    return float(np.mean(inside))


def main() -> None:
    """Print the figures beside those in use, and the error without and with them, each system by the others'."""
    for several_nodes, linked in product((False, True), repeat=2):
        how = f"{'several nodes' if several_nodes else 'one node'}, {'described links' if linked else 'own lines'}"
        print(f"beyond a table, {how}: {covered(several_nodes=several_nodes, linked=linked):.0%} in the error band")
    for several_nodes, table in MULTIPLES.items():
        known = {int(1024 * kib): both for kib, *both in table.T}
        found = logarithms(several_nodes=several_nodes)
        print("several nodes" if several_nodes else "one node", "-", ", ".join(found))
        for size, (mean, deviation) in multiples(found, known).items():
            in_use = "{:.2f}, deviation {:.2f}".format(*known[size])
            print(f"{size / 2**20:10.3f} MiB: {mean:.2f}, deviation {deviation:.2f}; in use {in_use}")
        for system, of_system in found.items():
            others = multiples({name: one for name, one in found.items() if name != system}, known)
            pairs = [(value, others[size]) for size in known for value in of_system.get(size, [])]
            if not pairs:
                continue
            alone = np.mean([abs(np.exp(-value) - 1) for value, _ in pairs])
            with_others = np.mean([abs(mean * np.exp(-value) - 1) for value, (mean, _) in pairs])
            print(
                f"    {system}: mean error {alone:.0%} by NCCL's model, {with_others:.0%} with the others' multiples"
            )


if __name__ == "__main__":
    main()
