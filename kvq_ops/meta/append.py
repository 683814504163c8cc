"""The fake of ``kvq::append``."""

from __future__ import annotations

from typing import Any

from .. import checks

__all__ = ["append"]


def append(*arguments: Any) -> None:
    """Returns nothing, as the op; arguments in the schema's order."""
    checks.append("kvq::append", *arguments)
