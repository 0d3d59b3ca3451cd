"""Runs ddplab under torchrun on two nodes, which are network namespaces of this machine, with two ranks each.

`python tests/scripts/two_nodes.py RATE WORD...` connects the nodes by virtual links of this rate and runs
`ddplab WORD...`. It needs Linux and root.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from validation.virtual_links import Links, bits_per_s, enter  # noqa: E402

NODES, RANKS_PER_NODE = 2, 2


def main(rate: str, *words: str) -> int:
    """Return the largest exit status of the nodes."""
    torchrun = ["torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}"]
    meeting = ["--master-addr=10.0.0.1", "--master-port=29500"]
    with Links(NODES, bits_per_s(rate)) as links:
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", *torchrun, *meeting, f"--node-rank={node}", "-m", "ddplab", *words],
                preexec_fn=partial(enter, links.namespace(node)),
            )
            for node in range(NODES)
        ]
        try:
            return max(process.wait() for process in nodes)
        finally:
            for process in nodes:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
