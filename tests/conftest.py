from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture
def outputs_start_as_nan() -> Iterator[None]:
    """What an op leaves unwritten in a fresh float tensor is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
