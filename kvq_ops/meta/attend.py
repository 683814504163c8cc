"""The fakes of ``kvq::attend`` and ``kvq::attend_lse``: fresh contiguous outputs, whatever the query's strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks

__all__ = ["attend", "attend_lse"]


def attend(query: Tensor, *arguments: Any) -> Tensor:
    """The output; arguments in the schema's order."""
    checks.attend("kvq::attend", query, *arguments)
    return query.new_empty(query.shape)


def attend_lse(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, fp32 without the last dimension; arguments in the schema's order."""
    checks.attend("kvq::attend_lse", query, *arguments)
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)
