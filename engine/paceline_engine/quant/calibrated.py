"""Rounds a whole checkpoint in one pass of a short text through it.

Each matrix is rounded when the text reaches it, for the inputs that it gets from the matrices before it,
which are rounded by then: so each makes up for what those before it did (GPTQ; Frantar et al., 2022).
Only one matrix is held in fp32 at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.errors import PacelineError
from paceline_engine.kernels import Bf16Weight
from paceline_engine.loading import open_tokenizer
from paceline_engine.loading.base import Checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.batch import PackedBatch
from paceline_engine.model.decoder import Decoder
from paceline_engine.model.kv import PagedKV
from paceline_engine.model.spec import ModelSpec
from paceline_engine.model.weights import DecoderWeights
from paceline_engine.quant import layout
from paceline_engine.quant.gptq import gptq_fp8, gptq_int4, gptq_int8
from paceline_engine.quant.layout import Part
from paceline_engine.quant.matrix import Matrix, pack

ROUNDED: Mapping[Variant, Callable[[Tensor, Tensor], Matrix]] = MappingProxyType(
    {Variant.INT4: gptq_int4, Variant.FP8: gptq_fp8, Variant.INT8: gptq_int8}
)
MAX_WEIGHTS = 1_500_000_000
"""Above this many weights it would take minutes, and large models lose less by plain rounding."""
_SEQUENCE_TOKENS = 512
_MAX_TOKENS = 2_560
"""More costs time and gains little."""
_BLOCK_SIZE = 16
_CPU = torch.device("cpu")

Source = Callable[[Part], Tensor]
OnPart = Callable[[Part], None]


def is_worth_it(spec: ModelSpec, variant: Variant) -> bool:
    """Whether this variant of such a model is rounded with a text."""
    n_weights = sum(part.shape[0] * part.shape[1] for part in layout.matrices(spec))
    return variant in ROUNDED and n_weights <= MAX_WEIGHTS


def calibration_ids(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """The text that ships with the engine, in this model's tokens and in sequences that fit its context.

    A checkpoint without a tokenizer gets random tokens, always the same ones.
    """
    spec = checkpoint.spec
    try:
        tokenizer = open_tokenizer(str(checkpoint.path))
    except PacelineError:
        start = None
        ids = random.Random(0).choices(range(spec.vocab_size), k=2 * _SEQUENCE_TOKENS)
    else:
        start = tokenizer.bos_token_id
        text = files("paceline_engine.quant").joinpath("calibration.txt").read_text(encoding="utf-8")
        ids = [each for each in tokenizer.encode(text) if each < spec.vocab_size][:_MAX_TOKENS]
    head = () if start is None else (start,)
    size = min(_SEQUENCE_TOKENS, spec.context_tokens) - len(head)
    return [(*head, *ids[first : first + size]) for first in range(0, len(ids), size)]


def round_checkpoint(
    checkpoint: Checkpoint,
    variant: Variant,
    *,
    source: Source,
    vectors: Mapping[str, Tensor],
    sequences: Sequence[Sequence[int]],
    on_part: OnPart,
) -> dict[str, Matrix]:
    """All matrices of ``layout`` in this variant.

    Args:
        source: gives a part's values, floating-point [N, K].
        vectors: norms and biases by their name in ``layout``.
        sequences: token ids, each sequence within the model's context.
        on_part: told of each matrix that is done.

    Raises:
        InvalidValueError: a matrix holds NaN or infinity.
        ModelLoadError: a tensor of the checkpoint is absent or damaged.
    """
    spec = checkpoint.spec
    rounding = _Rounding(variant=variant, source=source, on_part=on_part, done={})
    weights = DecoderWeights.assemble(
        spec,
        variant,
        matrices={part.name: _Pending(part=part) for part in layout.matrices(spec)},
        vectors=vectors,
        embedding=Bf16Weight(data=source(layout.embedding(spec)).to(torch.bfloat16).contiguous()),
        device=_CPU,
    )
    slices = _slices(sequences)
    kv = PagedKV.allocate(
        spec,
        n_blocks=sum(len(each.block_table) for each in slices),
        block_size=_BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=_CPU,
    )
    with torch.inference_mode():
        batch = PackedBatch.pack(slices, block_size=_BLOCK_SIZE, device=_CPU)
        normed = Decoder(spec, device=_CPU, multiply=rounding.multiply).forward(batch, weights, kv)
        rounding.multiply(normed, weights.output)
    return rounding.done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pending:
    """Stands where a matrix will be."""

    part: Part

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.shape[0], self.part.shape[1]

    @property
    def n_bytes(self) -> int:
        return 0

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        raise NotImplementedError("not rounded yet")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rounding:
    variant: Variant
    source: Source
    on_part: OnPart
    done: dict[str, Matrix]

    def multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Round the matrix for inputs like x [M, K] and multiply by what came out; fp32 [M, N]."""
        assert isinstance(matrix, _Pending)
        part, weight = matrix.part, self.source(matrix.part)
        moment = x.T @ x if _needs_text(part, self.variant) else None
        if moment is not None and bool(moment.isfinite().all()):
            rounded = ROUNDED[self.variant](weight, moment)
        else:
            # Weights that no training made can overflow; they are rounded all the same.
            rounded = pack(weight, self.variant)
        self.done[part.name] = rounded
        self.on_part(part)
        if part.name == layout.OUTPUT:
            # Nobody reads the logits.
            return x.new_empty((x.shape[0], 0))
        return functional.linear(x, rounded.dequantize())


def _needs_text(part: Part, variant: Variant) -> bool:
    """Rounding with a text takes time by the column, and int8 loses little where the columns are many."""
    return variant is not Variant.INT8 or part.shape[0] > part.shape[1]


def _slices(sequences: Sequence[Sequence[int]]) -> list[SequenceSlice]:
    slices: list[SequenceSlice] = []
    block = 0
    for ids in sequences:
        n_blocks = -(-len(ids) // _BLOCK_SIZE)
        table = range(block, block + n_blocks)
        slices.append(SequenceSlice(token_ids=ids, position=0, block_table=table, logits=Logits.ALL))
        block += n_blocks
    return slices
