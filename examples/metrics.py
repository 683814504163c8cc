"""What a smaller cache costs: a model's logits over it, compared with the text and with those over a plain cache.

Every figure is a mean over tokens and carries its standard error, that of tokens taken as independent; what is
compared with the plain cache is compared token by token, so that the text's own spread does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64
"""Rows compared at once: float64 log-probabilities of a 49152-token vocabulary, 25 MB a tensor."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float

    def text(self, form: str) -> str:
        return f"{self.value:{form}} ± {self.error:{form.replace('+', '')}}"


@dataclass(frozen=True)
class Readings:
    """What a model over one cache said: ``logits`` [n, vocab] after each token of a text, ``targets`` [n], the token
    that came next; ``recalled`` [m], the losses of a passage that came a second time."""

    logits: Tensor
    targets: Tensor
    recalled: Tensor


@dataclass(frozen=True)
class Quality:
    """Changes are relative, against the plain cache. ``agreement``: positions whose most likely token is the plain
    cache's, as a share. ``divergence``: mean KL(plain || this), nats."""

    perplexity: float
    perplexity_change: Estimate
    agreement: Estimate
    divergence: Estimate
    recall_perplexity: float
    recall_change: Estimate


@dataclass(frozen=True)
class Bars:
    """What a format must reach: the most and, for the agreement, the least that counts."""

    perplexity_change: float
    agreement: float
    divergence: float
    recall_change: float


BARS = {
    "int8": Bars(perplexity_change=0.005, agreement=0.985, divergence=0.002, recall_change=0.01),
    "int8_kivi": Bars(perplexity_change=0.002, agreement=0.995, divergence=0.0003, recall_change=0.01),
    "int8_hq": Bars(perplexity_change=0.002, agreement=0.995, divergence=0.0003, recall_change=0.01),
    "int4_kivi": Bars(perplexity_change=0.015, agreement=0.94, divergence=0.012, recall_change=0.10),
    "int4_hq": Bars(perplexity_change=0.01, agreement=0.95, divergence=0.008, recall_change=0.08),
}
"""By format, for SmolLM2-135M over at least 2048 tokens."""


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood, float64 [n], of each of ``targets`` [n] under ``logits`` [n, vocab]."""
    pairs = zip(logits.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([-rows.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0] for rows, wanted in pairs])


def perplexity(losses: Tensor) -> float:
    return float(losses.mean().exp())


def mean(x: Tensor) -> Estimate:
    """Of x [n], at least two."""
    return Estimate(float(x.double().mean()), float(x.double().std()) / math.sqrt(len(x)))


def change(plain: Tensor, other: Tensor) -> Estimate:
    """By how much, relatively, the perplexity of losses ``other`` [n] lies above that of ``plain`` [n], token by
    token the same."""
    difference = mean(other - plain)
    return Estimate(math.expm1(difference.value), math.exp(difference.value) * difference.error)


def compare(plain: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``other`` [n, vocab] against ``plain`` [n, vocab]: whether the most likely token is the same, bool [n],
    and KL(plain || other), float64 [n]."""
    pairs = list(zip(plain.split(ROWS), other.split(ROWS), strict=True))
    same = [expected.argmax(-1) == got.argmax(-1) for expected, got in pairs]
    return torch.cat(same), torch.cat(list(map(_divergences, *zip(*pairs, strict=True))))


def _divergences(expected: Tensor, got: Tensor) -> Tensor:
    log_p, log_q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def judge(plain: Readings, other: Readings) -> Quality:
    read, expected = (losses(readings.logits, readings.targets) for readings in (other, plain))
    same, divergences = compare(plain.logits, other.logits)
    return Quality(
        perplexity=perplexity(read),
        perplexity_change=change(expected, read),
        agreement=mean(same),
        divergence=mean(divergences),
        recall_perplexity=perplexity(other.recalled),
        recall_change=change(plain.recalled, other.recalled),
    )


def check(quality: Quality, bars: Bars, slack: float = 0) -> Iterator[tuple[str, bool]]:
    """What each bar asks and got, and whether it holds, a figure counting ``slack`` standard errors better than it is:
    for few tokens."""
    for name, got, most in (
        ("perplexity", quality.perplexity_change, bars.perplexity_change),
        ("recall perplexity", quality.recall_change, bars.recall_change),
    ):
        yield f"{name} within {most:.1%} of plain: {got.text('+.2%')}", abs(got.value) <= most + slack * got.error
    got, least, most = quality.agreement, bars.agreement, bars.divergence
    yield f"top-1 agreement at least {least}: {got.text('.4f')}", got.value >= least - slack * got.error
    got = quality.divergence
    yield f"mean KL at most {most}: {got.text('.6f')}", got.value <= most + slack * got.error


def verdicts(qualities: dict[str, Quality], slack: float = 0) -> dict[str, list[tuple[str, bool]]]:
    """:func:`check` of every format that has bars."""
    return {name: list(check(quality, BARS[name], slack)) for name, quality in qualities.items() if name in BARS}
