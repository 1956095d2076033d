"""The real Gemma 3 270M against transformers, with the same weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner

pytestmark = pytest.mark.real

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 64
N_TOKENS = 64
NEAR_TIE = 1e-3
"""Logits this close may change places with the order of a sum."""

PROMPTS = (
    "The capital of Norway is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    '{"tool": "get_weather", "arguments": {"city": "Oslo"}}\nResult:',
    "Q: What is the boiling point of water at sea level?\nA:",
    "Les trois plus grandes villes de France sont",
    "Die Hauptstadt von Österreich ist",
    "日本で一番高い山は",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to Spanish: Good morning, how are you?\n",
    "SELECT name, price FROM products WHERE",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Dear customer,\n\nthank you for your message about the late delivery.",
    "<html>\n<head>\n<title>",
    "User: My flight was cancelled. What can I do?\nAgent:",
    "🚀 Launch checklist:\n- ",
    "import numpy as np\n\ndef softmax(x: np.ndarray) -> np.ndarray:\n",
    "In 1969, the first",
    "   \n\n  strange   spacing \t and tabs",
    "Step 1: read the report. Step 2: find the number. Step 3: answer. " * 32,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Overrides the single thread of the tiny models: all of them run here."""


class Remembering:
    """A checkpoint that dequantizes each tensor once for all tests."""

    def __init__(self, checkpoint: Any) -> None:
        self.name, self.path, self.digest = checkpoint.name, checkpoint.path, checkpoint.digest
        self.spec, self.tensor_names = checkpoint.spec, checkpoint.tensor_names
        self.tensor = functools.cache(lambda name: checkpoint.tensor(name).float())


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    from paceline_engine.loading import open_checkpoint

    return Remembering(open_checkpoint("gemma3-270m"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from paceline_engine.loading import open_tokenizer

    tokenizer = open_tokenizer("gemma3-270m")
    return [list(tokenizer.encode(text, add_bos=True)) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(checkpoint: Any) -> Any:
    """Gemma3ForCausalLM in fp32 with the checkpoint's values; its configuration is that of the hub."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    values = {}
    for name in checkpoint.tensor_names():
        value = checkpoint.tensor(name)
        values[name] = value - 1 if name.endswith("norm.weight") else value
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model.load_state_dict(values, assign=True)
    # Buffers are not in the checkpoint: built again off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return model.eval()


def runner_of(checkpoint: Any, *variants: Variant) -> TorchRunner:
    return TorchRunner.load(
        checkpoint, variants=variants, n_blocks=len(PROMPTS) * BLOCKS_PER_SEQUENCE, block_size=BLOCK_SIZE
    )


def decode_greedily(runner: TorchRunner, prompts: list[list[int]], variant: Variant) -> list[list[int]]:
    """The next ``N_TOKENS`` tokens of all prompts, decoded as one batch."""
    texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(N_TOKENS):
        slices = [
            SequenceSlice(
                token_ids=text[done[index] :],
                position=done[index],
                block_table=range(index * BLOCKS_PER_SEQUENCE, (index + 1) * BLOCKS_PER_SEQUENCE),
                logits=Logits.LAST,
            )
            for index, text in enumerate(texts)
        ]
        tokens = runner.forward(slices, variant).argmax(-1).tolist()
        done = [len(text) for text in texts]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_greedy_tokens_are_those_of_the_reference(
    checkpoint: Any, prompts: list[list[int]], reference: Any
) -> None:
    """64 greedy tokens of 20 prompts, decoded in one batch, are what transformers gives.

    The reference scores prompt and tokens in one pass: when its most likely token at every position is the
    one that was decoded there, its own greedy output is the same, by induction. Where it prefers another
    token, the two must be a tie within rounding.
    """
    found = decode_greedily(runner_of(checkpoint, Variant.FP32), prompts, Variant.FP32)
    ties = []
    for text, prompt, tokens in zip(PROMPTS, prompts, found, strict=True):
        rows = reference_rows(reference, prompt, tokens)
        for at, (token, best) in enumerate(zip(tokens, rows.argmax(-1).tolist(), strict=True)):
            if token != best:
                gap = float(rows[at, best] - rows[at, token])
                assert gap < NEAR_TIE, f"{text!r}, token {at}: {token} for {best}, {gap:.4f} apart"
                ties.append(gap)
    assert len(ties) <= 3, f"too many near-ties to be chance: {ties}"
    assert len({tuple(tokens) for tokens in found}) >= len(PROMPTS) - 1


def test_logits_past_the_sliding_window_match_the_reference(
    checkpoint: Any, prompts: list[list[int]], reference: Any
) -> None:
    """A prompt longer than the window of 512, prefilled in chunks, gives the reference's logits."""
    ids = prompts[-1]
    assert len(ids) > 600
    runner = runner_of(checkpoint, Variant.FP32)
    table = range(5, 5 + BLOCKS_PER_SEQUENCE)
    for start, end in ((0, 100), (100, 530)):
        runner.forward(
            [SequenceSlice(token_ids=ids[start:end], position=start, block_table=table, logits=Logits.NONE)],
            Variant.FP32,
        )
    last = SequenceSlice(token_ids=ids[530:], position=530, block_table=table, logits=Logits.ALL)
    found = runner.forward([last], Variant.FP32)
    expected = reference_rows(reference, ids[:531], [*ids[531:], 0])
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-2)
    assert float((found - expected).square().mean().sqrt()) < 1e-3


@pytest.mark.parametrize(("variant", "limit"), [(Variant.BF16, 0.02), (Variant.INT8, 0.05)])
def test_lower_precision_stays_near_the_reference(
    variant: Variant, limit: float, checkpoint: Any, prompts: list[list[int]], reference: Any
) -> None:
    """The mean KL divergence of next tokens from the fp32 reference, in nats, stays below its bound."""
    runner = runner_of(checkpoint, variant)
    divergences = []
    for prompt in prompts[:4]:
        table = range(BLOCKS_PER_SEQUENCE)
        rows = runner.forward(
            [SequenceSlice(token_ids=prompt, position=0, block_table=table, logits=Logits.ALL)], variant
        )
        expected = reference_rows(reference, prompt[:1], [*prompt[1:], 0]).log_softmax(-1)
        divergences.append((expected.exp() * (expected - rows.log_softmax(-1))).sum(-1))
    assert 0 < float(torch.cat(divergences).mean()) < limit


def reference_rows(reference: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """The reference's logits at the positions that predict ``tokens``, fp32 [len(tokens), vocab]."""
    ids = torch.tensor([prompt + tokens[:-1]])
    with torch.inference_mode():
        logits: Tensor = reference(ids, logits_to_keep=len(tokens)).logits[0]
    return logits
