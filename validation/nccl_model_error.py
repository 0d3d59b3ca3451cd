"""How far NCCL's own cost model is from published all-reduces: the figures of `MULTIPLES` in the simulator.

    python -m validation.nccl_model_error

The rate of each system and number of GPUs is that of its fastest published message, so that only the shape is
compared. Sources: Alps is boeschf/nccl-benchmark-on-alps-2025 (fastest of ten configurations), Azure ND A100 v4
NetX-lab/Echo, vTrain VIA-Research/vTrain; the others are logs of nccl-tests that providers and users published.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import log
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.fabric import Level
from simulator.fabric.nccl_cost_model import MULTIPLES, Multiple, nccl_all_reduce

DATA = Path(__file__).parent / "data" / "nccl_all_reduces.csv"
NVLINK_GB_PER_S = {"V100": 134.5, "A100": 230.9, "H100": 340.0, "GH200": 340.0}
"""Bus bandwidth inside a node; it tells the model the generation where only several nodes were measured."""
LEAST_GPUS = 4
"""Two and three GPUs of one node are left out, because of their direct links."""

Logarithms = Mapping[str, Mapping[int, list[float]]]
"""Logarithms of measured over modelled times, by system and size."""


def logarithms(*, several_nodes: bool) -> Logarithms:
    """Return the logarithms of measured over modelled times of all systems, for messages of powers of two."""
    table = pd.read_csv(DATA)
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, rows in table.groupby(["system", "gpus"]):
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
        costs = [cost.costs_ns(rows["bytes"].to_numpy()) for cost in nccl_all_reduce(levels).values()]
        for size, us, ns in zip(rows["bytes"], rows["us"], np.min(costs, axis=0), strict=True):
            found[system][int(size)].append(log(us * 1e3 / ns))
    return found


def multiples(found: Logarithms, sizes_bytes: Iterable[int]) -> dict[int, Multiple]:
    """Return mean and deviation between systems, of which each has the same weight, at these sizes."""
    by_size = {}
    for size in sizes_bytes:
        systems = [np.mean(of_size[size]) for of_size in found.values() if size in of_size]
        by_size[size] = Multiple(float(np.exp(np.mean(systems))), float(np.std(systems, ddof=len(systems) > 1)))
    return by_size


def main() -> None:
    """Print the figures beside those in use, and the error without and with them, each system by the others'."""
    for several_nodes, known in MULTIPLES.items():
        found = logarithms(several_nodes=several_nodes)
        print("several nodes" if several_nodes else "one node", "-", ", ".join(found))
        for size, one in multiples(found, known).items():
            print(f"{size / 2**20:10.3f} MiB: {one.mean:.2f}, deviation {one.deviation:.2f}; in use {known[size]}")
        for system, of_system in found.items():
            others = multiples({name: one for name, one in found.items() if name != system}, known)
            pairs = [(value, others[size]) for size in known for value in of_system.get(size, [])]
            if not pairs:
                continue
            alone = np.mean([abs(np.exp(-value) - 1) for value, _ in pairs])
            with_others = np.mean([abs(other.mean * np.exp(-value) - 1) for value, other in pairs])
            print(
                f"    {system}: mean error {alone:.0%} by NCCL's model, {with_others:.0%} with the others' multiples"
            )


if __name__ == "__main__":
    main()
