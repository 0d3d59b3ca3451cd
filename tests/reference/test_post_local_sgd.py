"""Post-local SGD: local training with averages now and then."""

import torch

from . import post_local_sgd_bodies as bodies


def test_post_local_sgd_is_local_training_with_averages_now_and_then(four_ranks):
    results = four_ranks.run(bodies.local_sgd, 2)
    expected = bodies.local_sgd_by_hand(4, 2, results[0][1])
    for rank, (seen, _) in enumerate(results):
        for step, parameters in enumerate(seen):
            for got, wanted in zip(parameters, expected[step][rank], strict=True):
                torch.testing.assert_close(got, wanted)
