"""Logs as nccl-tests' `all_reduce_perf` prints them, with times that a test chooses."""

import json
from collections.abc import Mapping

HEADER = """\
# nThread 1 nGpus {ranks} minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
FOOTER = """\
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.0553
"""


def nccl_log(ranks: int, us: Mapping[int, float], in_place: float = 1.03) -> str:
    """A log of `ranks` ranks from times in microseconds by message size in bytes; those in place are a multiple."""
    devices = "\n".join(
        f"#  Rank {rank:>2} Group  0 Pid   1234 on       host device {rank:>2} [0x07] NVIDIA A100-SXM4-40GB"
        for rank in range(ranks)
    )
    rows = "".join(
        f"{size:>12}  {size // 4:>12}     float     sum      -1{_group(ranks, size, taken)}"
        f"{_group(ranks, size, in_place * taken)}\n"
        for size, taken in us.items()
    )
    return HEADER.format(ranks=ranks, devices=devices) + rows + FOOTER


def _group(ranks: int, size: int, us: float) -> str:
    """Time, algorithm bandwidth, bus bandwidth and wrong elements, with the digits that nccl-tests prints."""
    digits = 0 if us >= 10_000 else 1 if us >= 100 else 2
    algbw = size / us / 1e3
    return f"  {us:>7.{digits}f}  {algbw:>6.2f}  {algbw * 2 * (ranks - 1) / ranks:>6.2f}  {0:>5}"


def as_json(us: dict[int, float], ranks: int) -> str:
    """The same as JSON of nccl-tests."""

    def timed(size: int, taken: float) -> dict[str, float]:
        return {"time": taken, "alg_bw": size / taken / 1e3, "bus_bw": size / taken / 1e3 * 2 * (1 - 1 / ranks)}

    return json.dumps({
        "config": {"devices": [{"rank": rank, "device": rank} for rank in range(ranks)]},
        "results": [
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": -1,
             "out_of_place": {**timed(size, 1.5 * taken), "nwrong": 0.0},
             "in_place": {**timed(size, taken), "nwrong": None}}
            for size, taken in us.items()
        ],
    })  # fmt: skip


def rccl_records(us: dict[int, float], ranks: int, name: str = "AllReduce") -> list[dict[str, object]]:
    """The same as records of rccl-tests."""
    return [
        {"numCycle": 0, "name": name, "nodes": 1, "ranks": ranks, "ranksPerNode": ranks, "gpusPerRank": 1,
         "size": size, "type": "float", "redop": "sum", "inPlace": place, "time": taken, "algBw": size / taken / 1e3,
         "busBw": size / taken / 1e3 * 2 * (1 - 1 / ranks), "wrong": "0"}
        for size, taken in us.items() for place in (0, 1)
    ]  # fmt: skip


def as_csv(records: list[dict[str, object]]) -> str:
    """Records of rccl-tests as CSV."""
    return "\n".join(", ".join(map(str, line)) for line in (records[0], *(one.values() for one in records)))
