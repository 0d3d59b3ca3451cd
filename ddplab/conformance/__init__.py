"""Conformance: shows whether a data-parallel class is mathematically local training, and still safe.

Any class with the constructor of torch's `DistributedDataParallel` can be checked, and others that
`class_under_test.py` lists. Random programs train on real ranks and on one process, and the results must be equal,
bit for bit wherever the sums are exact.

    ddplab conform torch.nn.parallel:DistributedDataParallel
"""
