"""Checkpoints made in memory from transformers models, so that the decoder is tested without the loaders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner
from paceline_engine.model.spec import Activation, LayerKind, ModelSpec, RopeSpec

BLOCK_SIZE = 4
N_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint whose tensors are already in memory."""

    spec: ModelSpec
    tensors: dict[str, Tensor]
    name: str = "memory"
    digest: str = "0" * 64
    path: Path = Path("memory")

    def tensor_names(self) -> Iterable[str]:
        return self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True, kw_only=True)
class BlockOwner:
    """One sequence that a test feeds to a runner, with blocks of its own in a scattered order."""

    blocks: tuple[int, ...]

    def piece(
        self, ids: Sequence[int], start: int, end: int | None = None, *, logits: Logits = Logits.ALL
    ) -> SequenceSlice:
        return SequenceSlice(token_ids=ids[start:end], position=start, block_table=self.blocks, logits=logits)


def build_reference(kind: str, **changes: Any) -> Any:
    """A tiny random transformers model in fp32: ``gemma3``, ``llama``, ``mistral``, ``qwen2``, ``qwen3``."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "head_dim": 16,
        "attn_implementation": "eager",
        "tie_word_embeddings": False,
    }
    extra: dict[str, Any] = {
        "gemma3": {
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
        "llama": {},
        "mistral": {"sliding_window": 8},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 32},
    }[kind]
    name = {"gemma3": "Gemma3Text", "qwen2": "Qwen2", "qwen3": "Qwen3"}.get(kind, kind.title())
    config = getattr(transformers, f"{name}Config")(**(common | extra | changes))
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = path.endswith("norm.weight")
            base = 1.0 if is_norm and kind != "gemma3" else 0.0
            parameter.copy_(base + noise * (0.2 if parameter.ndim == 1 else 0.25))
    return model


def checkpoint_of(model: Any) -> MemoryCheckpoint:
    """What a loader would make of the model."""
    config = model.config
    gemma = config.model_type == "gemma3_text"
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if gemma:
        tensors = {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    layer_kinds = tuple(
        LayerKind.SLIDING if kind == "sliding_attention" else LayerKind.FULL
        for kind in kinds or ["full_attention"] * config.num_hidden_layers
    )
    ropes = config.rope_parameters
    scale = (config.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    spec = ModelSpec(
        family=config.model_type.removesuffix("_text"),
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        rope=rope_of(ropes["full_attention"] if gemma else ropes),
        local_rope=rope_of(ropes["sliding_attention"]) if gemma else None,
        layer_kinds=layer_kinds,
        sliding_window=window,
        tied_embeddings=config.tie_word_embeddings,
        qk_norm=any("q_norm" in name for name in tensors),
        sandwich_norms=gemma,
        attention_bias=any("q_proj.bias" in name for name in tensors),
        output_bias=any("o_proj.bias" in name for name in tensors),
        attention_scale=scale,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
    )
    return MemoryCheckpoint(spec=spec, tensors=tensors)


def rope_of(parameters: dict[str, Any]) -> RopeSpec:
    return RopeSpec(
        theta=parameters["rope_theta"],
        scaling=parameters["rope_type"],
        factor=parameters.get("factor") or 1.0,
        low_freq_factor=parameters.get("low_freq_factor") or 1.0,
        high_freq_factor=parameters.get("high_freq_factor") or 4.0,
        original_context=parameters.get("original_max_position_embeddings") or 0,
        attention_factor=parameters.get("attention_factor"),
    )


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """fp32 [T, vocab] of one sequence run whole."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def random_ids(n: int, *, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def scattered(index: int, *, n_sequences: int = 4) -> BlockOwner:
    """Blocks that belong to sequence ``index`` alone, from the end backwards."""
    return BlockOwner(blocks=tuple(range(N_BLOCKS - 1 - index, -1, -n_sequences)))


class Lab:
    """What the tests of the decoder share."""

    build_reference = staticmethod(build_reference)
    checkpoint_of = staticmethod(checkpoint_of)
    reference_logits = staticmethod(reference_logits)
    random_ids = staticmethod(random_ids)
    scattered = staticmethod(scattered)

    def __init__(self) -> None:
        self._references: dict[str, Any] = {}

    def reference(self, kind: str) -> Any:
        """The unchanged model of a family."""
        if kind not in self._references:
            self._references[kind] = build_reference(kind)
        return self._references[kind]

    def runner(
        self, source: Any, *variants: Variant, cache_dir: Path | None = None, **options: Any
    ) -> TorchRunner:
        """A runner of a transformers model or of a checkpoint; fp32 where no variant is named."""
        checkpoint = checkpoint_of(source) if hasattr(source, "config") else source
        options = {"n_blocks": N_BLOCKS, "block_size": BLOCK_SIZE} | options
        return TorchRunner.load(
            checkpoint, variants=variants or (Variant.FP32,), cache_dir=cache_dir, **options
        )


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterable[None]:
    """Tiny models are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
