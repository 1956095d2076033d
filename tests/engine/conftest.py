"""Tiny random models of every family, as a safetensors folder and as a GGUF, beside the reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CORPUS = (
    "the agent reads the answer of the tool and tells the user what it found",
    "the weather in Oslo is cold today, and the weather in Rome is warm",
    "what is the time there? it is ten to nine in the evening",
    "a model that answers in time is better than a model that answers late",
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' "
    "else message['role'] %}<start_of_turn>{{ role }}\n{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """One random model in both file formats. ``reference`` holds the very weights that the files hold."""

    family: str
    safetensors: Path
    """The folder."""
    gguf: Path
    reference: Any
    """The transformers model, in fp32 and in eval mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyAdapter:
    """A random LoRA adapter as PEFT writes it."""

    folder: Path
    deltas: dict[str, Any]
    """What it adds to each matrix, fp32, by the matrix's name in the checkpoint."""


TinyModelFactory = Callable[..., TinyModel]
"""``(family, *, tensor_type="F32")``; quantized types go to all matrices."""


@pytest.fixture(scope="session", autouse=True)
def paceline_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("PACELINE_CACHE")
    os.environ["PACELINE_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PACELINE_CACHE"]
    else:
        os.environ["PACELINE_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    """Makes a tiny model; the same arguments give the same one."""
    made: dict[tuple[str, str], TinyModel] = {}

    def make(family: str, *, tensor_type: str = "F32") -> TinyModel:
        key = (family, tensor_type)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{tensor_type}")
            made[key] = _make(family, tensor_type, folder)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyAdapter]:
    """Writes an adapter over some projections of a transformers model's layers."""

    def make(
        model: Any,
        *,
        seed: int = 0,
        rank: int = 4,
        alpha: float = 8.0,
        targets: tuple[str, ...] = PROJECTIONS,
        dtype: str = "float32",
        **config: Any,
    ) -> TinyAdapter:
        import torch
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(seed)
        folder = tmp_path_factory.mktemp("adapter")
        tensors: dict[str, Any] = {}
        deltas: dict[str, Any] = {}
        for name, weight in model.state_dict().items():
            module = name.removesuffix(".weight")
            if not name.endswith("_proj.weight") or module.rpartition(".")[2] not in targets:
                continue
            n_outputs, n_inputs = weight.shape
            down = torch.randn((rank, n_inputs), generator=generator) / n_inputs**0.5
            up = torch.randn((n_outputs, rank), generator=generator) / rank
            down, up = (each.to(getattr(torch, dtype)) for each in (down, up))
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            deltas[name] = scale * up.float() @ down.float()
        save_file(tensors, folder / "adapter_model.safetensors")
        described = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": list(targets),
            "bias": "none",
            **config,
        }
        (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        return TinyAdapter(folder=folder, deltas=deltas)

    return make


def _make(family: str, tensor_type: str, folder: Path) -> TinyModel:
    from transformers import AutoModelForCausalLM

    tokenizer = sentencepiece_tokenizer() if family in ("gemma3", "mistral") else byte_level_tokenizer()
    vocab = _vocabulary(tokenizer)
    model = AutoModelForCausalLM.from_config(_config(family, len(vocab), vocab)).float().eval()
    _randomize(model, family, tensor_type)
    hf = folder / f"tiny-{family}"
    model.save_pretrained(hf)
    _write_tokenizer(hf, tokenizer, family)
    gguf_path = folder / f"tiny-{family}.gguf"
    write_gguf(gguf_path, model, family, tokenizer, tensor_type)
    return TinyModel(family=family, safetensors=hf, gguf=gguf_path, reference=model)


def _config(family: str, vocab_size: int, vocab: dict[str, int]) -> Any:
    import transformers

    bos, eos = _specials(family)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None if bos is None else vocab[bos],
        "eos_token_id": vocab[eos],
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **common | {"num_hidden_layers": 7},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            architectures=["Gemma3ForCausalLM"],
        )
    if family == "llama":
        return transformers.LlamaConfig(
            **common,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        )
    if family == "mistral":
        return transformers.MistralConfig(**common, head_dim=16, sliding_window=8)
    if family == "qwen2":
        return transformers.Qwen2Config(**common, tie_word_embeddings=True)
    return transformers.Qwen3Config(**common, head_dim=32)


def _randomize(model: Any, family: str, tensor_type: str) -> None:
    """Weights large enough for logits to differ, rounded to what ``tensor_type`` can hold."""
    import gguf
    import torch

    generator = torch.Generator().manual_seed(7)
    kind = gguf.GGMLQuantizationType[tensor_type]
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = (0.0 if family == "gemma3" else 1.0) + 0.1 * noise
        elif name.endswith(".bias"):
            value = 0.1 * noise
        else:
            value = noise / parameter.shape[-1] ** 0.5
            packed = gguf.quants.quantize(value.numpy(), kind)
            value = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
        parameter.data.copy_(value)


def _specials(family: str) -> tuple[str | None, str]:
    return {
        "gemma3": ("<bos>", "<end_of_turn>"),
        "mistral": ("<bos>", "<end_of_turn>"),
        "llama": ("<|begin_of_text|>", "<|im_end|>"),
    }.get(family, (None, "<|im_end|>"))


def byte_level_tokenizer() -> Any:
    """A byte-level BPE of 256 bytes, a few merges and ChatML's control tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def sentencepiece_tokenizer() -> Any:
    """A BPE over pieces with ``▁`` for the space and byte fallback, as Gemma's is."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, trainers

    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    bpe = json.loads(trained.to_str())["model"]
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "\n"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    merges = [tuple(merge) for merge in bpe["merges"]]
    merged = ["".join(merge) for merge in merges]
    letters = [piece for piece in bpe["vocab"] if piece not in set(merged)]
    pieces = control + bytes_ + merged + letters
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control[:-1]])
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    return tokenizer


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    return dict(sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))


def _write_tokenizer(folder: Path, tokenizer: Any, family: str) -> None:
    bos, eos = _specials(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": _chat_template(family),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _chat_template(family: str) -> str:
    if family in ("gemma3", "mistral"):
        return GEMMA
    return ("{{ bos_token }}" if family == "llama" else "") + CHATML


def write_gguf(path: Path, model: Any, family: str, tokenizer: Any, tensor_type: str) -> None:
    """Write the model as llama.cpp's converter does."""
    import gguf

    arch = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(str(path), arch)
    _write_hyperparameters(writer, model.config, family, arch)
    _write_vocabulary(writer, tokenizer, family)
    kind = gguf.GGMLQuantizationType[tensor_type]
    for name, tensor in gguf_tensors(model, family).items():
        matrix = tensor.ndim == 2
        data = gguf.quants.quantize(tensor, kind) if matrix else tensor
        writer.add_tensor(name, data, raw_dtype=kind if matrix and tensor_type != "F32" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_hyperparameters(writer: Any, config: Any, family: str, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope["full_attention"] if family == "gemma3" else rope)["rope_theta"])
    if family in ("gemma3", "mistral"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)


def _write_vocabulary(writer: Any, tokenizer: Any, family: str) -> None:
    import gguf

    described = json.loads(tokenizer.to_str())
    vocab = _vocabulary(tokenizer)
    added = {token["content"]: token["special"] for token in described["added_tokens"]}
    pieces = list(vocab)
    kinds = [
        gguf.TokenType.CONTROL
        if added.get(piece)
        else gguf.TokenType.USER_DEFINED
        if piece in added
        else gguf.TokenType.BYTE
        if piece.startswith("<0x")
        else gguf.TokenType.NORMAL
        for piece in pieces
    ]
    merges = [tuple(merge) for merge in described["model"]["merges"]]
    bos, eos = _specials(family)
    if family in ("gemma3", "mistral"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        rank = {"".join(merge): index for index, merge in enumerate(merges)}
        writer.add_token_scores(
            [-1000.0 if piece in added else -float(rank.get(piece, 500)) for piece in pieces]
        )
        writer.add_unk_token_id(vocab["<unk>"])
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    if bos is not None:
        writer.add_bos_token_id(vocab[bos])
    writer.add_eos_token_id(vocab[eos])
    writer.add_add_bos_token(bos is not None)
    writer.add_chat_template(_chat_template(family))


GGUF_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}


def gguf_tensors(model: Any, family: str) -> dict[str, Any]:
    """The model's tensors under llama.cpp's names, in llama.cpp's order of rows and norms."""
    config = model.config
    norms = (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if family == "gemma3"
        else {"post_attention_layernorm": "ffn_norm"}
    )
    tops = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("norm.weight") and family == "gemma3":
            value = value + 1
        if name in tops:
            tensors[tops[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        module, leaf = rest.rsplit(".", 1)
        if family in ("llama", "mistral") and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            # [heads * head_dim, hidden]: rows i and i + head_dim / 2 become neighbours
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        tensors[f"blk.{layer}.{(GGUF_LAYER_NAMES | norms)[module]}.{leaf}"] = value
    if family == "llama":
        tensors["rope_freqs.weight"] = llama3_frequency_factors(config)
    return tensors


def llama3_frequency_factors(config: Any) -> Any:
    """Divisors of the frequencies (formula of Llama 3.1's reference), as the converter stores them."""
    import numpy as np

    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(
        wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, middle)
    )
    return divisors.astype(np.float32)
