"""Pinned prefixes: blocks that other traffic does not evict while a tool runs.

A pin holds a reference to each cached block of a prefix, like a sequence that only rests. It ends with
``unpin``, with its expiry, or when nothing else can run without its blocks: a pin changes what is evicted
first, and is never a reason to stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_engine.cache.blocks import BlockPool
from paceline_engine.cache.prefix import CacheScope


@dataclass(frozen=True, slots=True)
class _Pin:
    blocks: tuple[int, ...]
    expires_at_s: float


class Pins:
    """The pins of one pool, in the order in which they were made. Not thread-safe."""

    def __init__(self, pool: BlockPool, *, max_share: float) -> None:
        """``max_share`` of the pool's blocks may be pinned at most."""
        self._pool = pool
        self._limit = int(pool.n_blocks * max_share)
        self._pins: dict[str, _Pin] = {}
        self._pinned: Counter[int] = Counter()

    @property
    def n_blocks(self) -> int:
        """Blocks that at least one pin holds."""
        return len(self._pinned)

    def pin(self, pin_id: str, token_ids: Sequence[int], scope: CacheScope, *, expires_at_s: float) -> int:
        """Hold what is cached of a prefix, as far as the limit goes; gives the tokens held.

        A pin of the same id is replaced. Nothing is computed: what is not cached is not pinned.
        """
        self.unpin(pin_id)
        held: list[int] = []
        room = self._limit - self.n_blocks
        for block in self._pool.best_blocks(token_ids, scope):
            if block not in self._pinned:
                if room < 1:
                    break
                room -= 1
            held.append(block)
        if held:
            self._pool.retain(held)
            self._pinned.update(held)
            self._pins[pin_id] = _Pin(tuple(held), expires_at_s)
        return len(held) * self._pool.block_size

    def unpin(self, pin_id: str) -> None:
        """Give a pin's blocks back; an unknown or expired one is ignored."""
        if (pin := self._pins.pop(pin_id, None)) is None:
            return
        self._pool.release(pin.blocks)
        for block in pin.blocks:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]

    def expire(self, now_s: float) -> None:
        """End the pins whose time has passed."""
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires_at_s <= now_s]:
            self.unpin(pin_id)

    def drop_oldest(self) -> bool:
        """End the pin that was made first; False where there is none."""
        oldest = next(iter(self._pins), None)
        if oldest is None:
            return False
        self.unpin(oldest)
        return True
