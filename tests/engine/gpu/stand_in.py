"""A model of random weights in the sizes of Gemma 3 270M, for machines that no checkpoint can be brought to.

The output matrix is the embedding table with its rows moved by one: so the likeliest next token stands far
above the others, as after training, and rounding seldom changes which one it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GEMMA_SIZED: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 1 << 17,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
)
SMALL: Mapping[str, Any] = MappingProxyType(
    {
        **GEMMA_SIZED,
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
    }
)
"""The same in little, for tests of what uses it."""
_SHARE = 0.35
"""Of each sublayer in the residual stream."""


def write_stand_in(folder: Path, config: Mapping[str, Any] = GEMMA_SIZED) -> str:
    """Write the model as a safetensors folder with a tokenizer of single bytes; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    _write_tokenizer(folder)
    return str(folder)


def _tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (
        config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value")
    )
    matrices = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": (hidden, 1.0),
        "post_attention_layernorm": (hidden, _SHARE),
        "pre_feedforward_layernorm": (hidden, 1.0),
        "post_feedforward_layernorm": (hidden, _SHARE),
        "self_attn.q_norm": (config["head_dim"], 1.0),
        "self_attn.k_norm": (config["head_dim"], 1.0),
    }
    embedding = _matrix("embedding", (config["vocab_size"], hidden))
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.roll(1, 0),
        "model.norm.weight": _norm("norm", hidden, 1.0),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in matrices.items():
            path = f"model.layers.{layer}.{name}.weight"
            tensors[path] = _matrix(path, shape)
        for name, (size, share) in norms.items():
            path = f"model.layers.{layer}.{name}.weight"
            tensors[path] = _norm(path, size, share)
    return tensors


def _matrix(name: str, shape: tuple[int, int]) -> Tensor:
    return (_random(name, shape) * shape[1] ** -0.5).bfloat16()


def _norm(name: str, size: int, share: float) -> Tensor:
    """Gemma's files hold what is added to 1."""
    return (share * (1 + 0.1 * _random(name, (size,))) - 1).bfloat16()


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _write_tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}), encoding="utf-8")
