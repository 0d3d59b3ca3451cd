"""How far NCCL's own cost model is from published all-reduces: the figures of `BEYOND_THE_MODEL` in the simulator.

Also how often published times lie in the error band where a table that was cut off is continued, by described links
or by its own lines.

    python -m validation.nccl_model_error

The rate of each system and number of GPUs is that of its fastest published message, so that only the shape is
compared. Sources: Alps is boeschf/nccl-benchmark-on-alps-2025 (fastest of ten configurations), Azure ND A100 v4
NetX-lab/Echo, vTrain VIA-Research/vTrain; the others are logs of nccl-tests that providers and users published: A3
Mega lessizzmore/create-a3mega-ztan-fork@02dd8f45, p5 aws-samples/awsome-distributed-training@721785, Lambda
dstackai/dstack@511c318c, MI300X hisohara/ai-scripts (rccl-tests), p4d of 2022 NVIDIA/nccl issue 527, RoCE its issue
2409, the H100s of gj-aion and shahizat issues 309 and 290 of NVIDIA/nccl-tests; 8 A100, P5en and P6-B200
stas00/ml-engineering@744d01e1, network/README.md.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddplab.simulator.fabric import Fabric, Level, Topology
from ddplab.simulator.fabric.algorithms import BEYOND_THE_MODEL, LATEST, UNKNOWN_WAIT, all_reduce_costs

DATA = Path(__file__).parent / "data" / "nccl_all_reduces.csv"
NVLINK_GB_PER_S = {"V100": 134.5, "A100": 230.9, "H100": 365.0, "GH200": 340.0, "B200": 684.0, "MI300X": 315.7}
NVLINK_GB_PER_S["H200"] = NVLINK_GB_PER_S["H100"]
"""Bus bandwidth inside a node, without reduction in its switches, where this was not measured."""
NETWORK_GB_PER_S = {"AWS p5": 320.0, "Nebius H100": 344.0, "H100, InfiniBand (gj-aion)": 344.0}
"""Rate between two nodes as in the catalogue, where the links inside a node are the slower ones."""
REDUCES = ("H100", "H200", "B200")
"""GPUs whose nodes of 8 reduce in their switches."""
INFINIBAND = (
    *("Azure ND A100 v4", "Azure ND40rs v2", "Azure NDm A100 v4", "Nebius H100", "Lambda B200"),
    *("H100, InfiniBand (gj-aion)", "H100, InfiniBand (shahizat)"),
)
SLINGSHOT, TCPXO = ("Alps", "GH200 with Slingshot"), ("GCP A3 Mega",)
LATENCY_US = {
    **dict.fromkeys(("AWS p4d", "AWS p4d, 2022"), 91.0),
    **dict.fromkeys(INFINIBAND, 16.6),
    **dict.fromkeys(SLINGSHOT, 14.8),
    "AWS p5": 36.0,
    **dict.fromkeys(TCPXO, 63.0),
    "MI300X, RoCE": 111.0,
}
"""Latency of a hop between nodes, as in the catalogue, where it is not NCCL's 14 us."""
LEAST_WAIT = 0.1
"""Pieces of a message that wait for a shorter part of the usual time do not wait, or the links are out of order."""
BUCKETS = 2**20, 2**27
"""Smallest and largest message for which transports are compared, bytes."""
LEAST_GPUS = 4
"""Two and three GPUs of one node are left out, because of their direct links."""


def tables(*, several_nodes: bool) -> Iterator[tuple[str, pd.DataFrame, list[Level]]]:
    """Yield the published tables: the system, the rows of one number of GPUs, and the links."""
    for _, rows in pd.read_csv(DATA).groupby(["system", "gpus"]):
        system, gpu, gpus, per_node = rows[["system", "gpu", "gpus", "gpus_per_node"]].values.tolist()[0]
        nodes = max(1, gpus // per_node)
        if (nodes > 1) != several_nodes or gpus < LEAST_GPUS:
            continue
        rate = (2 * (gpus - 1) / gpus * rows["bytes"] / rows["us"]).max() * 1e6
        reduces = gpu in REDUCES and per_node == 8
        described = 1e9 * NVLINK_GB_PER_S[gpu]
        inside = described if reduces else rate if nodes == 1 else max(rate, described)
        hop_ns = round(1e3 * LATENCY_US.get(system, 14.0))
        between = rate
        if reduces and nodes == 2:  # each byte passes the network once
            between = 1e9 * NETWORK_GB_PER_S.get(system, rate / 2e9)
        levels = [
            Level(name="nvlink", members=gpus // nodes, latency_ns=3_400, bytes_per_s=inside, reduces=reduces),
            Level(name="network", members=nodes, latency_ns=hop_ns, bytes_per_s=between),
        ]
        yield system, rows, levels


class Measured(NamedTuple):
    """A published time beside the model's, and what the figure of a message that waits multiplies; nanoseconds."""

    ns: float
    model_ns: float
    unit_ns: float

    def figure(self, *, waits: bool) -> float:
        """Return what is averaged over the systems for `BEYOND_THE_MODEL`; where nothing waits its logarithm."""
        if waits:
            return (self.ns - self.model_ns) / self.unit_ns
        return log(self.ns / self.model_ns)

    def missed(self, figure: float, *, waits: bool) -> float:
        """Return the logarithm of the measured time over the one that this figure lets expect."""
        if waits:
            return log(self.ns / (self.model_ns + figure * self.unit_ns))
        return log(self.ns / self.model_ns) - figure


Rows = Mapping[str, Mapping[int, list[Measured]]]
"""Published times by system and size."""


def measured(*, several_nodes: bool, waits: bool, usual: bool = True) -> Rows:
    """Return the published times of messages whose pieces wait for the first one, or do not.

    `usual`: over InfiniBand, RoCE and EFA, whose pieces wait equally long, or over the other transports.
    """
    found: dict[str, dict[int, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for system, rows, levels in tables(several_nodes=several_nodes):
        if (system in (*SLINGSHOT, *TCPXO) and several_nodes) == usual:
            continue
        sizes = np.append(rows["bytes"].to_numpy(), 1)
        costs = all_reduce_costs(levels, "nccl", "library", LATEST)
        *model_ns, empty_ns = np.min([cost.costs_ns(sizes) for cost in costs.costs.values()], axis=0)
        for size, us, ns, wait in zip(rows["bytes"], rows["us"], model_ns, costs.waits(sizes[:-1]), strict=True):
            if wait == waits:
                unit_ns = sqrt(ns * empty_ns) * (1.0 if several_nodes else UNKNOWN_WAIT)
                found[system][int(size)].append(Measured(1e3 * us, float(ns), unit_ns))
    return found


def figures(found: Rows, sizes_bytes: Iterable[int], *, waits: bool) -> dict[int, tuple[float, float]]:
    """Return mean figure and deviation between systems, of which each has the same weight, at these sizes."""
    by_size = {}
    for size in sizes_bytes:
        systems = [of_size[size] for of_size in found.values() if size in of_size]
        means = [np.mean([one.figure(waits=waits) for one in rows]) for rows in systems]
        mean = float(np.median(means) if waits else np.mean(means))  # some networks have outliers
        missed = [np.mean([one.missed(mean, waits=waits) for one in rows]) for rows in systems]
        by_size[size] = mean, float(np.std(missed, ddof=len(systems) > 1))
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
                faster, slower = 1 + fabric.relative_errors(sizes[beyond], gpus)
                inside += ((costs_ns / faster <= ns[beyond]) & (ns[beyond] <= costs_ns * slower)).tolist()
    return float(np.mean(inside))


def main() -> None:
    """Print the figures beside those in use, and the error without and with them, each system by the others'."""
    for several_nodes, linked in product((False, True), repeat=2):
        how = f"{'several nodes' if several_nodes else 'one node'}, {'described links' if linked else 'own lines'}"
        print(f"beyond a table, {how}: {covered(several_nodes=several_nodes, linked=linked):.0%} in the error band")
    for waits, table in BEYOND_THE_MODEL.items():
        known = {int(1024 * kib): both for kib, *both in table.T}
        found = measured(several_nodes=waits, waits=waits)
        print("several nodes" if waits else "one node", "-", ", ".join(found))
        for size, (mean, deviation) in figures(found, known, waits=waits).items():
            in_use = "{:.2f}, deviation {:.2f}".format(*known[size])
            figure = mean if waits else exp(mean)
            print(f"{size / 2**20:10.3f} MiB: {figure:.2f}, deviation {deviation:.2f}; in use {in_use}")
        for system in found:
            show_errors(
                found, {name: one for name, one in found.items() if name != system}, system, known, waits=waits
            )
    print("how many times as long pieces wait over a transport")
    by_size = {size: mean for size, (mean, _) in figures(found, known, waits=True).items()}
    waiting = []
    for system, of_size in {**found, **measured(several_nodes=True, waits=True, usual=False)}.items():
        if times := times_longer(of_size, by_size):
            print(f"    {system}: {np.median(times):.2f} ({', '.join(f'{one:.1f}' for one in times)})")
            waiting.append(float(np.median(times)))
    logarithms = [log(one) for one in waiting if one > LEAST_WAIT]
    ends = ", ".join(f"{exp(np.mean(logarithms) + deviations * np.std(logarithms)):.2f}" for deviations in (-1, 0, 1))
    print(f"    unknown: one standard deviation below, mean, above: {ends}")
    print("one node whose switches reduce, with the figures of several nodes")
    in_switches = measured(several_nodes=False, waits=True)
    for system in in_switches:
        show_errors(in_switches, found, system, known, waits=True)


def times_longer(of_size: Mapping[int, list[Measured]], by_size: Mapping[int, float]) -> list[float]:
    """Return by how much a system's figures exceed those of the usual transports, for the sizes of buckets."""
    sizes = [size for size in by_size if size in of_size and BUCKETS[0] <= size <= BUCKETS[1]]
    return [float(np.median([one.figure(waits=True) for one in of_size[size]])) / by_size[size] for size in sizes]


def show_errors(found: Rows, others: Rows, system: str, sizes_bytes: Iterable[int], *, waits: bool) -> None:
    """Print the mean error of a system's times at these sizes by NCCL's model, and with the figures of the others."""
    pairs = [(one, size) for size in sizes_bytes for one in found[system].get(size, [])]
    if pairs:
        expected = figures(others, sizes_bytes, waits=waits)
        alone = np.mean([abs(one.model_ns / one.ns - 1) for one, _ in pairs])
        missed = [one.missed(expected[size][0], waits=waits) for one, size in pairs]
        with_others = np.mean(np.abs(np.expm1(-np.array(missed))))
        print(f"    {system}: mean error {alone:.0%} by NCCL's model, {with_others:.0%} with the others' figures")


if __name__ == "__main__":
    main()
