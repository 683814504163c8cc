"""A transformers cache whose full-attention layers are quantized."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from ...format import MAX_TOKENS, CacheFormat, get_format
from ..table import table
from .layer import KVQLayer, PlainLayer, crop_count

__all__ = ["CacheReport", "KVQCache", "LayerReport"]

_WINDOWS = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class LayerReport:
    """One layer of a :class:`KVQCache`: its type in the model, the format that it is kept in ("" where it is plain),
    why, and the bytes that it holds now (0 before the first update)."""

    layer: int
    layer_type: str
    format: str
    reason: str
    nbytes: int

    @property
    def quantized(self) -> bool:
        return bool(self.format)


@dataclass(frozen=True)
class CacheReport:
    """Every layer of a :class:`KVQCache`. ``str()`` makes a table."""

    layers: tuple[LayerReport, ...]

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def plain(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.quantized)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def __str__(self) -> str:
        rows = []
        for layer in self.layers:
            kept = layer.format or "plain"
            rows.append([str(layer.layer), layer.layer_type, kept, f"{layer.nbytes:,}", layer.reason])
        outcome = f"{len(self.quantized)} of {len(self.layers)} quantized"
        rows.append(["all", "", outcome, f"{self.nbytes:,}", ""])
        return table(["layer", "type", "kept as", "bytes", "why"], rows)


class KVQCache(Cache):
    """The cache of a transformers model, with full attention over quantized keys and values.

    ``model.set_attn_implementation("kvq")`` first, then ``model.generate(..., past_key_values=cache)``, or ``cache=``
    where transformers calls it so. Memory is taken at the first update (or by ``early_initialization``) and kept;
    :meth:`reset` makes the cache ready for another prompt. A prompt may be padded at the left; padding is never cached.

    Layers of full attention are quantized, and layers whose window or chunk is no shorter than ``max_cache_len``, which
    therefore hides nothing. All others are transformers' own static layers. :meth:`report` says what became of each.

    Args:
        config: the model's configuration.
        max_cache_len: capacity of each sequence in tokens, prompt and answer together.
        format: a preset's name, ``<key>/<value>`` such as ``"int8/int4"``, or a :class:`CacheFormat`.
        skip_layers: indices of layers that stay plain; negative ones count from the end.
        offloading: keep layers on the CPU while other layers run (CUDA only).
        offload_only_non_sliding: leave layers with a window where they are.

    Raises:
        ValueError: for an argument that is none of these, for a layer type or a soft cap that no layer supports, and
            where nothing would be quantized.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int,
        format: str | CacheFormat = "int8",
        *,
        skip_layers: Iterable[int] = (),
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        config = config.get_text_config(decoder=True)
        try:
            self.format = get_format(format)
        except ValueError as error:
            raise ValueError(f"KVQCache: {error}") from None
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
            _refuse("max_cache_len", "be an int of at least 1", repr(max_cache_len))
        if max_cache_len > MAX_TOKENS:
            _refuse("max_cache_len", f"be at most {MAX_TOKENS}", max_cache_len)
        self.model_type = str(getattr(config, "model_type", "unknown"))
        softcap = getattr(config, "attn_logit_softcapping", None)
        if softcap is not None:
            got = f"{softcap} (model type {self.model_type!r})"
            _refuse("config.attn_logit_softcapping", "be None, attend has no soft cap yet", got)
        types, arguments = _layer_types(config)
        skipped = _skipped(skip_layers, len(types))
        self._types, self._reasons = types, [""] * len(types)
        layers: list[Any] = []
        given_to_all: dict[str, Any] = {"model_type": self.model_type, "offloads": offloading, "siblings": object()}
        for i, (layer_type, given) in enumerate(zip(types, arguments, strict=True)):
            self._reasons[i] = _reason(layer_type, given, max_cache_len, i in skipped)
            if self._reasons[i]:
                layers.append(_plain_layer(layer_type, given, max_cache_len, self.model_type))
            else:
                layers.append(KVQLayer(max_cache_len, self.format, **given_to_all))
        if not any(isinstance(layer, KVQLayer) for layer in layers):
            reasons = "; ".join(sorted(set(self._reasons)))
            _refuse("config", "have a layer to quantize", f"none in model type {self.model_type!r}: {reasons}")
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)

    def report(self) -> CacheReport:
        """What became of each layer."""
        return CacheReport(
            tuple(
                LayerReport(
                    i,
                    self._types[i],
                    layer.format.name if isinstance(layer, KVQLayer) else "",
                    self._reasons[i],
                    _nbytes(layer),
                )
                for i, layer in enumerate(self.layers)
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers; 0 before the first update."""
        return sum(_nbytes(layer) for layer in self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` positions of every sequence.

        Raises ``ValueError``, before anything is changed, for a positive number and where a layer cannot go back."""
        count = crop_count("KVQCache", tokens_to_remove)
        self._check_layers("crop")
        for i, layer in enumerate(self.layers):
            if count and getattr(layer, "is_sliding", False) and layer.is_initialized:
                window, seen = layer.max_cache_len, layer.cumulative_length_int  # its tensor stops at a full window
                if seen > window:
                    got = f"{seen} at layer {i}, whose window of {window} keeps no older ones"
                    raise ValueError(f"KVQCache.crop: positions must be within every window, got {got}")
        # Quantized layers refuse before they write, and all hold as many tokens: the first of them speaks for all.
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, KVQLayer)):
            layer.crop(-count)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, one after another."""
        self._check_layers("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``, in that order."""
        self._check_layers("batch_select_indices")
        super().batch_select_indices(indices)

    def _check_layers(self, method: str) -> None:
        for i, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                requirement = f"have {method} in every layer"
                raise ValueError(
                    f"KVQCache.{method}: the model must {requirement}, got {type(layer).__name__} at layer {i}"
                )


def _refuse(argument: str, requirement: str, got: object) -> NoReturn:
    raise ValueError(f"KVQCache: {argument} must {requirement}, got {got}")


def _layer_types(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The type of each layer and what its cache layer is made with. transformers 5.18 gives one dict for all."""
    types, given = get_layer_types_and_kwargs(config)
    return list(types), [dict(given) for _ in types] if isinstance(given, dict) else list(given)


def _skipped(skip_layers: Iterable[int], layers: int) -> set[int]:
    found = set()
    for layer in skip_layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -layers <= layer < layers:
            _refuse("skip_layers", f"be ints in {-layers}..{layers - 1}", repr(layer))
        found.add(layer % layers)
    return found


def _reason(layer_type: str, given: dict[str, Any], max_cache_len: int, skipped: bool) -> str:
    """Why a layer stays plain, or "" where it is quantized."""
    if layer_type == "full_attention":
        return "skip_layers names it" if skipped else ""
    if layer_type not in _WINDOWS:
        return f"{layer_type} is transformers' own"
    window = given["sliding_window"]
    if window < max_cache_len:
        return f"a window of {window} is shorter than max_cache_len {max_cache_len}, and attend has no window yet"
    return "skip_layers names it" if skipped else ""


def _plain_layer(layer_type: str, given: dict[str, Any], max_cache_len: int, model_type: str) -> Any:
    if layer_type == "full_attention":
        return PlainLayer(max_cache_len)
    if layer_type not in STATIC_LAYER_TYPE_MAPPING:
        _refuse("config.layer_types", "be types of transformers' static layers", f"{layer_type!r} ({model_type})")
    return STATIC_LAYER_TYPE_MAPPING[layer_type](max_cache_len=max_cache_len, **given)


def _nbytes(layer: Any) -> int:
    if isinstance(layer, KVQLayer):
        return layer.nbytes
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        tensors += getattr(layer, name, {}).values()
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
