"""Tiny random models of the architectures that transformers has, for tests and the table in docs/transformers.md."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""How this version of transformers calls a model's cache."""
VOCABULARY, LAYERS = 128, 4
WINDOW = 16

BOUNDS = {"int8": 0.03, "int8_hq": 0.025, "k8v4": 0.25, "int4_hq": 0.35}
"""Of the relative L2 error of these models' logits: a format's error of attention on normal data (docs/formats.md) once
for each of four layers, independent of each other, so twice; and half as much again, for heads as small as 16."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough that attention is far from uniform, which would hide what a cache costs.
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Architecture:
    """A model type, what its configuration needs besides the common sizes, or does not take of them, and its name in
    the table."""

    name: str
    model_type: str
    given: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_EXPERTS = {
    # All of them, so that what is compared is not which one an error made the router choose.
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_SHARED = {**_HYBRID, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
_GEMMA_4 = {**_SHARED, "global_head_dim": 16, "num_global_key_value_heads": 2}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}

ARCHITECTURES = (
    Architecture("Llama", "llama"),
    Architecture("Mistral", "mistral", {"sliding_window": None}),
    Architecture("Mistral, all layers with a window", "mistral", {"sliding_window": WINDOW}),
    Architecture("Qwen2", "qwen2"),
    Architecture("Qwen3", "qwen3"),
    Architecture("Gemma 2", "gemma2", {**_HYBRID, "query_pre_attn_scalar": 16}),
    Architecture("Gemma 2 without soft cap", "gemma2", {**_HYBRID, "attn_logit_softcapping": None}),
    Architecture("Gemma 3", "gemma3_text", {**_HYBRID, "query_pre_attn_scalar": 16}),
    Architecture("Phi-3", "phi3", {"sliding_window": None}),
    Architecture("gpt-oss", "gpt_oss", {**_HYBRID, **_EXPERTS}),
    Architecture("OLMo 2", "olmo2"),
    Architecture("Granite", "granite", {"attention_multiplier": 0.2}),
    Architecture("StableLM", "stablelm"),
    Architecture("Falcon", "falcon", _FALCON, without=("head_dim", "num_key_value_heads", "intermediate_size")),
    Architecture("GPT-NeoX", "gpt_neox"),
    Architecture("Gemma 4, layers sharing K and V", "gemma4_text", _GEMMA_4),
    Architecture("Qwen3-Next", "qwen3_next", _LINEAR),
    Architecture("DeepSeek-V3", "deepseek_v3", _LATENT, without=("head_dim",)),
)


def architecture(name: str) -> Architecture:
    return next(found for found in ARCHITECTURES if found.name == name)


def tiny_model(chosen: Architecture, seed: int = 0, **given: Any) -> PreTrainedModel:
    """A random model in eval mode, the same for the same seed."""
    sizes = {name: size for name, size in COMMON.items() if name not in chosen.without}
    config = AutoConfig.for_model(chosen.model_type, **{**sizes, **chosen.given, **given})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error of logits, whose common offset means nothing."""
    found, expected = (logits - logits.mean(-1, keepdim=True) for logits in (found, expected))
    return float((found - expected).norm() / expected.norm())
