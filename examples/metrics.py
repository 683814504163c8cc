"""What a smaller cache costs: logits compared with the text and with the plain cache's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64
"""Rows compared at once: float64 log-probabilities of a 49152-token vocabulary, 25 MB a tensor."""


@dataclass(frozen=True)
class Comparison:
    """``agreement``: positions whose most likely token is the same, as a share. ``divergence``: mean KL(plain || other)
    in nats."""

    agreement: float
    divergence: float


def perplexity(logits: Tensor, targets: Tensor) -> float:
    """exp of the mean negative log-likelihood of ``targets`` [n] under ``logits`` [n, vocab]."""
    total = 0.0
    for rows, wanted in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        log_p = rows.double().log_softmax(-1)
        total -= float(log_p.gather(-1, wanted[:, None]).sum())
    return float(torch.tensor(total / len(targets), dtype=torch.float64).exp())


def compare(plain: Tensor, other: Tensor) -> Comparison:
    """``other`` [n, vocab] against ``plain`` [n, vocab]."""
    same, divergence = 0, 0.0
    for expected, got in zip(plain.split(ROWS), other.split(ROWS), strict=True):
        same += int((expected.argmax(-1) == got.argmax(-1)).sum())
        log_p, log_q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
    return Comparison(same / len(plain), divergence / len(plain))
