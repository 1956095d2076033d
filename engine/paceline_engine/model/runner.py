"""Runs a checkpoint's variants with torch, over one paged KV cache."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from paceline_engine.backends.base import OnProgress, Progress
from paceline_engine.cuda.faults import MemoryBudget, memory_explained
from paceline_engine.cuda.graphs import Capture, DecodeGraphs, DecodeInputs, Sizes, cuda_capture
from paceline_engine.cuda.support import Support
from paceline_engine.loading.adapter_files import read_adapter
from paceline_engine.loading.base import Checkpoint
from paceline_engine.mode import Variant
from paceline_engine.model.adapter import Adapter
from paceline_engine.model.base import Logits, SequenceSlice, Vocabulary
from paceline_engine.model.batch import PackedBatch, PlannedAttention
from paceline_engine.model.decoder import Decoder
from paceline_engine.model.head import OutputHead
from paceline_engine.model.kv import PagedKV
from paceline_engine.model.ops import linear
from paceline_engine.model.spec import ModelSpec
from paceline_engine.model.weights import DecoderWeights
from paceline_engine.quant import layout
from paceline_engine.quant.layout import bytes_per_step, looks_up_output
from paceline_engine.quant.matrix import Matrix, to_device
from paceline_engine.quant.store import OnFraction, WeightStore

_MOST_GATHERED_BYTES = 1 << 28
"""Keys and values that a captured step may gather for one layer."""
_PAGE_BYTES = 4096


class TorchRunner:
    """A ``ModelRunner`` on one device. Build it with ``load``.

    Not thread-safe, but for ``load_variant``: one step loop drives it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        variants: Sequence[Variant],
        kv: PagedKV,
        store: WeightStore,
        support: Support | None = None,
    ) -> None:
        self._spec = checkpoint.spec
        self._variants = tuple(variants)
        self._kv = kv
        self._device = kv.keys.device
        self._store = store
        self._support = support
        self._attention = None if support is None else PlannedAttention.of(self._spec, flash=support.flash)
        self._decoder = Decoder(self._spec, device=self._device)
        self._vectors = {name: tensor.to(self._device) for name, tensor in store.vectors().items()}
        self._loading = threading.Lock()
        self._weights: dict[Variant, DecoderWeights] = {}
        self._embeddings: dict[Variant, Matrix] = {}
        self._heads: dict[Variant, OutputHead] = {}
        # Where steps are captured the last block is scratch, and nobody's.
        self._n_blocks = kv.n_blocks if support is None else kv.n_blocks - 1
        self._graphs: DecodeGraphs[Variant] | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        variants: Sequence[Variant],
        device: str | torch.device = "cpu",
        n_blocks: int,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        on_progress: OnProgress | None = None,
        cache_dir: Path | None = None,
        lazy: bool = False,
        support: Support | None = None,
    ) -> Self:
        """Open a checkpoint's variants.

        Args:
            variants: those that may be run, best quality first.
            kv_dtype: None for bf16, or fp32 where only the fp32 reference is run.
            on_progress: told of the loading, and of the conversion (stage ``convert``) of what the cache
                does not have.
            cache_dir: where converted weights are kept; None for the user's cache folder.
            lazy: convert or map a variant when it is first used, not now.
            support: what a GPU multiplies and attends with; None for what is found by trying it, and on a
                CPU for the kernels.

        Raises:
            ModelError: the checkpoint's weights are damaged, absent or not supported.
        """
        assert variants, "a runner without variants"
        where = torch.device(device)
        if kv_dtype is None:
            kv_dtype = torch.float32 if set(variants) == {Variant.FP32} else torch.bfloat16
        budget = MemoryBudget.of_kv(
            checkpoint.spec, n_blocks=n_blocks, block_size=block_size, kv_dtype=kv_dtype, device=where
        )
        with memory_explained(str(checkpoint.path), budget):
            if support is None and where.type != "cpu":
                support = Support.probe(where)
            kv = PagedKV.allocate(
                checkpoint.spec,
                n_blocks=n_blocks if support is None else n_blocks + 1,
                block_size=block_size,
                dtype=kv_dtype,
                device=where,
            )
            store = WeightStore(checkpoint, directory=cache_dir)
            runner = cls(checkpoint, variants=variants, kv=kv, store=store, support=support)
            if not lazy:
                runner._load_all(on_progress if on_progress is not None else lambda _: None, runner.variants)
        return runner

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def n_blocks(self) -> int:
        return self._n_blocks

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self._variants

    @property
    def kv(self) -> PagedKV:
        return self._kv

    def bytes_per_variant(self) -> Mapping[Variant, int]:
        """Bytes of weights that a decode step of one token reads, loaded or not."""
        return {
            variant: bytes_per_step(self._spec, variant)
            if (loaded := self._weights.get(variant)) is None
            else loaded.bytes_per_step
            for variant in self._variants
        }

    @property
    def loaded(self) -> tuple[Variant, ...]:
        """The variants whose weights are in memory."""
        return tuple(each for each in self._variants if each in self._weights)

    def forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, *, vocabulary: Vocabulary | None = None
    ) -> Tensor:
        """One pass over all slices; writes their KV. fp32 logits [rows, vocab_size]."""
        assert variant in self._variants, f"{variant} is not among the runner's variants"
        try:
            return self._forward(slices, variant, vocabulary)
        except torch.OutOfMemoryError:
            # What the allocator keeps for sizes that are not asked for now may be all that is missing.
            torch.cuda.empty_cache()
        return self._forward(slices, variant, vocabulary)

    def capture_decode(
        self, *, max_sequences: int, variants: Sequence[Variant] | None = None, capture: Capture | None = None
    ) -> int:
        """Capture decode steps of up to ``max_sequences`` ahead of their use; nothing on a CPU.

        Args:
            variants: those to capture; None for all.
            capture: how; None for CUDA graphs.

        Returns:
            how many steps are captured.
        """
        if self._attention is None or (capture is None and self._device.type != "cuda"):
            return 0
        keys = self._kv.layers[0][0]
        block_bytes = 2 * keys[0].numel() * keys.element_size()
        longest = -(-self._spec.context_tokens // self.block_size)
        self._graphs = DecodeGraphs(
            self._decode_step,
            sizes=Sizes.of(
                max_sequences=max_sequences,
                max_blocks=min(longest, self._n_blocks),
                block_size=self.block_size,
                most_gathered_blocks=max(longest, _MOST_GATHERED_BYTES // block_bytes),
            ),
            block_size=self.block_size,
            scratch_block=self._n_blocks,
            device=self._device,
            capture=capture if capture is not None else cuda_capture(self._device),
        )
        with torch.inference_mode():
            for variant in self._variants if variants is None else variants:
                self._weights_of(variant)
                if not self._graphs.capture_all(variant):
                    break
        return self._graphs.n_captured

    def _forward(
        self, slices: Sequence[SequenceSlice], variant: Variant, vocabulary: Vocabulary | None
    ) -> Tensor:
        weights = self._weights_of(variant)
        with torch.inference_mode():
            hidden = self._replayed(slices, variant)
            if hidden is None:
                batch = PackedBatch.pack(
                    slices, block_size=self.block_size, device=self._device, attention=self._attention
                )
                hidden = self._decoder.forward(batch, weights, self._kv)
            if not hidden.shape[0]:
                return hidden.new_empty((0, self._spec.vocab_size))
            # A GPU reads the whole output matrix in less time than it takes to pick rows.
            if vocabulary is None or self._support is not None:
                return linear(hidden, weights.output)
            if variant not in self._heads:
                self._heads[variant] = OutputHead(weights.output)
            return self._heads[variant].logits(hidden, vocabulary)

    def _replayed(self, slices: Sequence[SequenceSlice], variant: Variant) -> Tensor | None:
        """What a captured step gives, fp32 [S, hidden]; None where there is none for these slices."""
        if self._graphs is None:
            return None
        if any(
            len(item.token_ids) > 1 or item.logits is Logits.NONE or item.adapter is not None
            for item in slices
        ):
            return None
        return self._graphs.run(variant, slices)

    def _decode_step(self, variant: Variant, inputs: DecodeInputs) -> Tensor:
        assert self._attention is not None
        plan = self._attention.plan_uniform(inputs.block_tables, inputs.positions, block_size=self.block_size)
        batch = PackedBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            meta=plan,
            logit_rows=None,
        )
        return self._decoder.forward(batch, self._weights[variant], self._kv)

    def read_adapter(self, path: str) -> Adapter:
        """See ``ModelRunner.read_adapter``."""
        return Adapter.build(read_adapter(path), self._spec, device=self._device, support=self._support)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in all layers (copy on write)."""
        self._kv.copy_block(source, target)

    def load_variant(self, variant: Variant) -> None:
        """Bring a variant's weights into memory, mapped pages too; may run beside ``forward`` of others.

        Raises:
            ModelError: they are damaged, absent or not supported.
        """
        with self._loading:
            if variant not in self._weights:
                self._load_variant(variant, lambda _fraction, _message: None)

    def _weights_of(self, variant: Variant) -> DecoderWeights:
        if variant not in self._weights:
            self.load_variant(variant)
        return self._weights[variant]

    def load_unconverted(self, on_progress: OnProgress) -> None:
        """Convert and load now what the cache does not have: too slow for a first use. Errors as ``load``."""
        missing = [each for each in self._variants if each not in self._weights and not self._store.has(each)]
        self._load_all(on_progress, missing)

    def _load_all(self, on_progress: OnProgress, variants: Sequence[Variant]) -> None:
        n_variants, converted = len(variants), False
        for index, variant in enumerate(variants):

            def report(fraction: float, message: str, index: int = index) -> None:
                nonlocal converted
                converted = True
                done = (index + fraction) / n_variants
                on_progress(Progress(stage="convert", done=done, message=message))

            self._load_variant(variant, report)
            share = 0.1 + 0.8 * (index + 1) / n_variants
            on_progress(Progress(stage="load", done=share, message=f"{variant} is ready"))
        if converted:
            on_progress(Progress(stage="convert", done=1.0, message="all variants are ready"))

    def _load_variant(self, variant: Variant, on_fraction: OnFraction) -> None:
        matrices = self._store.matrices(variant, on_fraction=on_fraction)
        _page_in(matrices.values())
        is_shared = self._spec.tied_embeddings and variant is Variant.BF16
        if is_shared and variant in self._embeddings:
            matrices[layout.OUTPUT] = self._embeddings[variant]
        weights = DecoderWeights.assemble(
            self._spec,
            variant,
            matrices=matrices,
            vectors=self._vectors,
            embedding=self._embedding_of(variant),
            device=self._device,
            support=self._support,
        )
        if is_shared:
            self._embeddings[variant] = weights.output
        self._weights[variant] = weights

    def _embedding_of(self, variant: Variant) -> Matrix | None:
        """The table where it is not the variant's output matrix; one for all variants but fp32."""
        if looks_up_output(self._spec, variant):
            return None
        precision = Variant.FP32 if variant is Variant.FP32 else Variant.BF16
        if precision not in self._embeddings:
            table = self._store.embedding(variant)
            assert table is not None
            _page_in([table])
            self._embeddings[precision] = to_device(table, precision, self._device)
        return self._embeddings[precision]


def _page_in(matrices: Iterable[Matrix]) -> None:
    """Read a byte of every page, so that no pass waits for a disk."""
    for matrix in matrices:
        for tensor in matrix.tensors().values():
            tensor.reshape(-1).view(torch.uint8)[::_PAGE_BYTES].max()
