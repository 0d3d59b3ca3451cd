"""What nccl-tests' `all_reduce_perf` prints, for times of ours."""

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


def nccl_log(ranks: int, us: Mapping[int, float]) -> str:
    """A log of so many ranks, from the out-of-place time in microseconds by bytes."""
    devices = "\n".join(
        f"#  Rank {rank:>2} Group  0 Pid   1234 on       host device {rank:>2} [0x07] NVIDIA A100-SXM4-40GB"
        for rank in range(ranks)
    )
    rows = "".join(
        f"{size:>12}  {size // 4:>12}     float     sum      -1  {taken:>7}    0.00    0.00      0"
        f"  {0.97 * taken:>7.2f}    0.00    0.00      0\n"
        for size, taken in us.items()
    )
    return HEADER.format(ranks=ranks, devices=devices) + rows + FOOTER
