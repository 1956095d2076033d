"""A whole model decodes alike with every instruction set, from one cache of converted weights."""

import pytest
import torch

from paceline_engine.kernels import selection
from paceline_engine.kernels.selection import Selection, select
from paceline_engine.loading import open_checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.runner import TorchRunner

N_PROMPT, N_NEW = 30, 20
TOLERANCE = 1e-2
"""Logits spread by about 1; what enters a rounded product may fall to either side of a tie."""
BLOCKS = tuple(range(12, -1, -1))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("decoding")


def decode(runner, variant, tokens):
    """Prefill, then ``tokens`` one at a time, or the greedy ones. Logits [N_NEW, vocab] and the tokens."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, runner.spec.vocab_size, (N_PROMPT,), generator=generator).tolist()
    rows, position = [], 0
    for step in range(N_NEW):
        piece = SequenceSlice(
            token_ids=ids[position:], position=position, block_table=BLOCKS, logits=Logits.LAST
        )
        position = len(ids)
        rows.append(runner.forward([piece], variant)[-1])
        ids.append(int(rows[-1].argmax()) if tokens is None else tokens[step])
    return torch.stack(rows), ids[N_PROMPT:]


@pytest.mark.parametrize("variant", list(Variant))
def test_every_set_decodes_what_torch_decodes(monkeypatch, native, tiny_model, cache_dir, variant):
    """Weights converted under torch's operators serve every set, which gives the same greedy tokens."""
    checkpoint = open_checkpoint(str(tiny_model("gemma3").safetensors))

    def run(chosen, tokens):
        monkeypatch.setattr(selection, "selected", lambda: chosen)
        runner = TorchRunner.load(
            checkpoint, variants=[variant], n_blocks=len(BLOCKS), block_size=4, cache_dir=cache_dir
        )
        return decode(runner, variant, tokens)

    expected, tokens = run(select("off"), None)
    files = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*.safetensors")}
    logits, _ = run(Selection(kernels=native, reason="under test"), tokens)
    assert {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*.safetensors")} == files
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=TOLERANCE)
    best, second = expected.topk(2).values.unbind(-1)
    clear = best - second > 2 * TOLERANCE
    assert clear.sum() > N_NEW / 2
    assert torch.equal(logits.argmax(-1)[clear], torch.tensor(tokens)[clear])
