"""In steady training no option and no comm hook reads a tensor on the host, which would make it wait for a GPU."""

import pytest

from . import device_reads_bodies as bodies


@pytest.mark.parametrize("hook", bodies.HOOKS)
def test_no_comm_hook_reads_a_tensor(two_ranks, hook):
    two_ranks.run(bodies.train_on_meta, "plain", hook)


@pytest.mark.parametrize("mode", bodies.MODES)
def test_no_option_reads_a_tensor(two_ranks, mode):
    two_ranks.run(bodies.train_on_meta, mode, "none")
