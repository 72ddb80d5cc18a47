"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_settings():
    """The trainer's settings of PyTorch do not outlast a test."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
