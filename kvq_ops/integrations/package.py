"""What a compiled or exported model carries of kvq_ops, so that ops or bytes of another version are refused by name.

torch checks neither: a package that was made before a byte layout changed would run and give wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..format import SCHEMA_VERSION

__all__ = ["PACKAGE_METADATA", "check_package"]

_KEY = "kvq_ops.schema_version"
PACKAGE_METADATA = {_KEY: str(SCHEMA_VERSION)}
"""To put into ``extra_files`` of ``torch.export.save`` or ``aot_inductor.metadata`` of an AOTInductor package. In C++
``kvq::schema_version`` is the number that a package must have."""


def check_package(metadata: Mapping[str, str | bytes]) -> None:
    """Raises ``RuntimeError`` where a model was made for other ops or bytes than these, or does not say.

    ``metadata`` is what ``torch.export.load`` wrote into its ``extra_files``, or ``get_metadata()`` of a loaded
    AOTInductor package."""
    got = metadata.get(_KEY) or "nothing"
    got = got.decode() if isinstance(got, bytes) else got
    if got != PACKAGE_METADATA[_KEY]:
        requirement = f"{_KEY} must be {PACKAGE_METADATA[_KEY]}, got {got}"
        raise RuntimeError(f"package: {requirement}: export and compile it again with this kvq_ops")
