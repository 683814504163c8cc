"""Everything that is timed, one module each, with one interface.

Importing the module fails where it cannot run here, and the error is the reason. Else it has
``VERSION``: name, version and build for the record;
``make(case, query_dtypes) -> Iterator[Contender]``: its lines of one case, for the torch threads that are set then.
"""

from __future__ import annotations

import importlib
from types import ModuleType

ORDER = ("floor", "kvq", "torch_sdpa", "onnxruntime_gqa", "openvino_paged", "vllm_cpu", "ik_llama", "llama_cpp")
"""In the order of the tables. The floor and ours first."""


def load(name: str) -> ModuleType | str:
    """The module, or why it cannot run here."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
