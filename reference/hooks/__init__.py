"""The former name of `reference.comm_hooks`, whose modules are importable from here too."""

import sys

from ..comm_hooks import allreduce, compress, post_local_sgd, powersgd, quantization

for _module in (allreduce, compress, post_local_sgd, powersgd, quantization):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
sys.modules[f"{__name__}.powersgd_state"] = powersgd
