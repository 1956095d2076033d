"""Runs the command line as people do: a process of its own, and what it prints. And a tiny model for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 16
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli.main import main; main()"


@pytest.fixture
def run() -> Run:
    """``paceline ARGUMENTS`` in a process; ``without_torch`` for an install without the engine extra."""

    def call(*arguments: str, without_torch: bool = False, **environment: str) -> Any:
        start = ("-c", WITHOUT_TORCH) if without_torch else ("-m", "paceline.cli.main")
        return subprocess.run(
            [sys.executable, *start, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
        )

    return call


@pytest.fixture
def real(run: Run) -> Callable[..., dict[str, Any]]:
    """The one JSON object that a command prints on the real model, without a calibration."""

    def call(*arguments: str) -> dict[str, Any]:
        done = run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The one plain line that a command says where it refuses, with exit status 2."""

    def call(*arguments: str, without_torch: bool = False) -> str:
        done = run(*arguments, without_torch=without_torch)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert done.stdout == ""
        said = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
        assert len(said) == 1
        assert done.stderr.rstrip().endswith(said[0])
        assert "Traceback" not in done.stderr
        return said[0]

    return call


@pytest.fixture
def missing(tmp_path: Path) -> str:
    """A path at which there is nothing."""
    return str(tmp_path / "none.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of a Qwen 3 with random weights; bytes are its tokens."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{name}.self_attn.q_norm.weight": torch.ones(HEAD),
            f"{name}.self_attn.k_norm.weight": torch.ones(HEAD),
            f"{name}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
