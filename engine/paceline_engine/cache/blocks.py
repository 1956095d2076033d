"""The block pool: who holds which KV block, and which blocks the prefix cache may give up.

A block is in exactly one of three states: free; held (one or more references); or cached (no reference,
but still known to the prefix index, and given up when memory is short).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline_engine.cache.prefix import CacheScope, HashKey, PrefixIndex, PrefixNode
from paceline_engine.cache.quality import best, serves
from paceline_engine.mode import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The cached blocks of a prefix, and the variants that wrote them."""

    blocks: tuple[int, ...] = ()
    written_by: tuple[Variant, ...] = ()
    node: PrefixNode | None = field(default=None, repr=False)
    """Of the last block; None where nothing matched."""


@dataclass(frozen=True, slots=True)
class _Published:
    node: PrefixNode
    variant: Variant


class BlockPool:
    """Reference counts of all KV blocks, with an automatic prefix cache over the full ones."""

    def __init__(self, n_blocks: int, block_size: int, *, hash_key: HashKey = hash) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = list(range(n_blocks - 1, -1, -1))
        self._references = [0] * n_blocks
        self._published: dict[int, _Published] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks without a reference that the index knows, least recently used first."""
        self._index = PrefixIndex(block_size, hash_key)

    @property
    def n_free(self) -> int:
        """Blocks that ``allocate`` can give: free ones, and cached ones that it would evict."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; the caller has checked ``n_free``."""
        assert count <= self.n_free, "allocate was called without checking n_free"
        return [self._take() for _ in range(count)]

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a cached one is held again."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is free and cannot be retained"
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence.

        The last block goes first, so that among cached blocks a child is always older than its parent and
        eviction in order of age takes leaves before what they stand on.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released more often than retained"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def best_blocks(self, token_ids: Sequence[int], scope: CacheScope) -> tuple[int, ...]:
        """The cached full blocks of a prefix, of each the one that serves the most variants."""
        nodes = itertools.takewhile(lambda node: bool(node.blocks), self._index.walk(token_ids, scope))
        return tuple(node.blocks[best(node.blocks)] for node in nodes)

    def match(
        self, token_ids: Sequence[int], scope: CacheScope, variant: Variant, *, mix: bool = False
    ) -> PrefixMatch:
        """The longest cached prefix that may serve ``variant``, in full blocks; with ``mix`` any may.

        At least the last token is left over: its logits have to be computed.
        """
        blocks: list[int] = []
        written_by: list[Variant] = []
        last: PrefixNode | None = None
        for node in self._index.walk(token_ids[:-1], scope):
            if (found := node.block_for(variant, mix=mix)) is None:
                break
            written_by.append(found[0])
            blocks.append(found[1])
            last = node
        return PrefixMatch(blocks=tuple(blocks), written_by=tuple(written_by), node=last)

    def cached_tokens(
        self, token_ids: Sequence[int], scope: CacheScope, variants: Iterable[Variant]
    ) -> dict[Variant, int]:
        """How many tokens ``match`` would serve to each variant, found in one walk."""
        counts = dict.fromkeys(variants, 0)
        alive = set(counts)
        for node in self._index.walk(token_ids[:-1], scope):
            alive = {variant for variant in alive if any(serves(by, variant) for by in node.blocks)}
            if not alive:
                break
            for variant in alive:
                counts[variant] += self.block_size
        return counts

    def mixed_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> int:
        """How many tokens ``match`` would serve where any variant's blocks may be used."""
        return len(self.best_blocks(token_ids[:-1], scope)) * self.block_size

    def publish(
        self, parent: PrefixNode | CacheScope, block: int, block_tokens: Sequence[int], variant: Variant
    ) -> tuple[PrefixNode, int]:
        """Make a held, full block findable after ``parent``: the scope, or the node before it.

        The caller holds the parent's block too, which keeps the parent in the index. Where the same tokens
        of the same variant are cached already, that block takes this one's place: it is retained and
        ``block`` is released.

        Returns:
            the node, parent of the next block, and the block that the sequence now holds.
        """
        above = self._index.root(parent) if isinstance(parent, CacheScope) else parent
        node = self._index.child(above, block_tokens)
        known = node.blocks.get(variant)
        if known is None:
            node.blocks[variant] = block
            self._published[block] = _Published(node, variant)
            return node, block
        if known != block:
            self.retain((known,))
            self.release((block,))
        return node, known

    def evict_cached(self) -> None:
        """Forget every cached block that nobody holds."""
        while self._cached:
            self._free.append(self._evict())

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block = next(
            (block for block in self._cached if not self._published[block].node.n_children),
            next(iter(self._cached)),
        )
        del self._cached[block]
        published = self._published.pop(block)
        del published.node.blocks[published.variant]
        self._index.prune(published.node)
        return block
