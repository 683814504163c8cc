"""Tables that scripts write into pages of docs, between ``<!-- name -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def with_block(page: str, name: str, made: str) -> str:
    """The page with ``made`` between its marks of that name."""
    pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
    page, count = re.subn(pattern, lambda found: found[1] + made + found[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page must have one block {name}, got {count}")
    return page
