"""The spread of devices and of iterations, from the times of all ranks."""

import pytest

from ddplab.calibration.device_spread import spread_of, time_iterations_alone


def test_devices_and_iterations_spread_apart_from_each_other():
    assert spread_of([[90, 110], [90, 110]]) == (0, pytest.approx(0.1))
    assert spread_of([[90, 90], [110, 110]]) == (pytest.approx(0.1), 0)


def test_every_rank_times_its_own_iterations(two_ranks):
    times = two_ranks.run(time_iterations_alone, "tests.models_for_cli:tiny", 4)
    assert [len(of_rank) for of_rank in times] == [4, 4]
    assert times[0] != times[1]
    assert min(map(min, times)) > 0
