"""Optional behaviour of a reducer, by the names of torch's arguments."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional behaviour of a reducer; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; then one ready order does not predict the next."""
        return self.find_unused_parameters and not self.static_graph


PLAIN = Features()
"""No optional behaviour."""
