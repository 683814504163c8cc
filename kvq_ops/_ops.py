"""The ops and their namespace, which nothing else in the package names.

This is the pip package's: ``torch.ops.kvq``, of the library that lies beside it. A build for the Hugging Face Hub has
a file of its own in this place, with a namespace that no other build has, so that several can be loaded at once.
"""

from __future__ import annotations

from typing import Any

import torch

from . import native

__all__ = ["add_op_namespace_prefix", "ops"]

native.load("kvq")
ops: Any = torch.ops.kvq


def add_op_namespace_prefix(op_name: str) -> str:
    """The name that torch knows an op by."""
    return f"kvq::{op_name}"
