"""Fake implementations, one file an op: what shapes an op gives and what it refuses, without data."""

from kvq_ops.meta.append import append
from kvq_ops.meta.attend import attend, attend_lse

__all__ = ["append", "attend", "attend_lse"]
