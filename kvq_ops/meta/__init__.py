"""Fake implementations, one file an op: what shapes an op gives and what it refuses, without data."""

from .append import append
from .attend import attend, attend_lse

__all__ = ["append", "attend", "attend_lse"]
