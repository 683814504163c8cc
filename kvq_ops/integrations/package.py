"""What a compiled or exported model carries of kvq_ops, so that ops or bytes of another version are refused by name,
and how a package calls the ops.

torch checks neither ops nor bytes: a package that was made before a byte layout changed would run and give wrong
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import ops as _defined  # noqa: F401 a build for CUDA alone defines its ops there
from .._ops import ops
from ..format import SCHEMA_VERSION

__all__ = ["C_SHIMS", "PACKAGE_METADATA", "check_package"]

_KEY = "kvq_ops.schema_version"
PACKAGE_METADATA = {_KEY: str(SCHEMA_VERSION)}
"""To put into ``extra_files`` of ``torch.export.save`` or ``aot_inductor.metadata`` of an AOTInductor package. In C++
``kvq::schema_version`` is the number that a package must have."""


def _declaration(op: Any) -> str:
    """Of the C function in csrc/shims.cpp, as Inductor calls it."""
    types = {"Tensor": "AtenTensorHandle", "Optional[Tensor]": "AtenTensorHandle*", "str": "const char*"}
    types["Optional[float]"] = "double*"
    schema = op._schema  # noqa: SLF001 the only way to the types
    given = [types[str(argument.type)] for argument in schema.arguments]
    given += ["AtenTensorHandle*"] * len(schema.returns) or ["void*"]
    return f"AOTITorchError aoti_torch_cpu_{schema.name.partition('::')[2]}({', '.join(given)})"


C_SHIMS: dict[Any, list[str]] = {
    op: [_declaration(op)]
    for op in (ops.append.default, ops.attend.default, ops.attend_lse.default)
    if not op.namespace.startswith("_")
}
"""For Inductor's ``aot_inductor.custom_ops_to_c_shims``: an AOTInductor package for the CPU then calls the library's C
functions, some microseconds a call faster than through torch's dispatcher. For torch 2.13 and newer. Whoever loads the
package has imported kvq_ops or, without Python, opened the library with ``RTLD_GLOBAL``. Empty in a build for the Hub,
whose library is not to be seen by others."""


def check_package(metadata: Mapping[str, str | bytes]) -> None:
    """Raises ``RuntimeError`` where a model was made for other ops or bytes than these, or does not say.

    ``metadata`` is what ``torch.export.load`` wrote into its ``extra_files``, or ``get_metadata()`` of a loaded
    AOTInductor package."""
    got = metadata.get(_KEY) or "nothing"
    got = got.decode() if isinstance(got, bytes) else str(got)
    if got != PACKAGE_METADATA[_KEY]:
        requirement = f"{_KEY} must be {PACKAGE_METADATA[_KEY]}, got {got}"
        raise RuntimeError(f"package: {requirement}: export and compile it again with this kvq_ops")
