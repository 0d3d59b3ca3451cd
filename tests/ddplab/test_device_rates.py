"""The measured rates of this machine's processor."""

import torch

from ddplab.calibration.device_rates import measure_device


def test_rates_are_those_of_the_elements_type():
    device = measure_device(torch.device("cpu"), torch.float64)
    assert device.flops_per_s > 1e8
    assert device.bytes_per_s > 1e8
