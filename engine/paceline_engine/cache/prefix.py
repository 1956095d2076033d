"""The prefix index: which KV blocks hold which tokens.

A trie whose nodes are found through one hash table, as in vLLM's automatic prefix caching (2024): a node's
key chains the hash of its block's tokens to its parent's key. Unlike there, a hit is checked against the
tokens and the parent themselves, so that a collision costs time and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from paceline_engine.cache.quality import best, serves
from paceline_engine.mode import Variant

HashKey = Callable[[Hashable], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScope:
    """What besides its tokens a prefix must share to be reused. Each field stands under its own name."""

    model: str
    """Digest of the weights."""
    adapter: str | None = None
    """Digest of the adapter's weights: another name for the same weights may share, new weights may not."""
    salt: str = ""
    """One per tenant."""

    def tagged(self) -> Hashable:
        return ("model", self.model), ("adapter", self.adapter), ("salt", self.salt)


class PrefixNode:
    """One block's worth of tokens after its parent's; the blocks that hold its KV, one a variant."""

    __slots__ = ("blocks", "content", "key", "n_children", "parent")

    def __init__(self, parent: PrefixNode | None, content: Hashable, key: int) -> None:
        self.parent = parent
        self.content = content
        """The block's tokens, or the scope for a root."""
        self.key = key
        self.n_children = 0
        self.blocks: dict[Variant, int] = {}

    def block_for(self, variant: Variant, *, mix: bool = False) -> tuple[Variant, int] | None:
        """The block that may serve ``variant``, one of its own where there is a choice.

        With ``mix`` the best of the lower ones may, where no other is there.
        """
        if (own := self.blocks.get(variant)) is not None:
            return variant, own
        for by, block in self.blocks.items():
            if serves(by, variant):
                return by, block
        if mix and self.blocks:
            return (by := best(self.blocks)), self.blocks[by]
        return None


class PrefixIndex:
    """Finds the node of a prefix. Holds no references to blocks: the pool tells it what is gone."""

    def __init__(self, block_size: int, hash_key: HashKey = hash) -> None:
        self._block_size = block_size
        self._hash_key = hash_key
        self._buckets: dict[int, list[PrefixNode]] = {}

    def __len__(self) -> int:
        """Nodes held, roots among them."""
        return sum(len(bucket) for bucket in self._buckets.values())

    def walk(self, token_ids: Sequence[int], scope: CacheScope) -> Iterator[PrefixNode]:
        """The known nodes of the full blocks of ``token_ids``, from the first on."""
        node = self._find(None, scope.tagged())
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            if node is None or (node := self._find(node, tuple(token_ids[start : start + size]))) is None:
                return
            yield node

    def root(self, scope: CacheScope) -> PrefixNode:
        return self._find_or_add(None, scope.tagged())

    def child(self, parent: PrefixNode, block_tokens: Sequence[int]) -> PrefixNode:
        return self._find_or_add(parent, tuple(block_tokens))

    def prune(self, node: PrefixNode) -> None:
        """Forget ``node``, and what stands above it, where neither blocks nor children are left."""
        current: PrefixNode | None = node
        while current is not None and not current.blocks and not current.n_children:
            bucket = self._buckets[current.key]
            bucket.remove(current)
            if not bucket:
                del self._buckets[current.key]
            if current.parent is not None:
                current.parent.n_children -= 1
            current = current.parent

    def _key(self, parent: PrefixNode | None, content: Hashable) -> int:
        return self._hash_key((("parent", None if parent is None else parent.key), ("content", content)))

    def _find(self, parent: PrefixNode | None, content: Hashable) -> PrefixNode | None:
        return self._find_in(self._key(parent, content), parent, content)

    def _find_in(self, key: int, parent: PrefixNode | None, content: Hashable) -> PrefixNode | None:
        for node in self._buckets.get(key, ()):
            if node.parent is parent and node.content == content:
                return node
        return None

    def _find_or_add(self, parent: PrefixNode | None, content: Hashable) -> PrefixNode:
        key = self._key(parent, content)
        if (node := self._find_in(key, parent, content)) is not None:
            return node
        node = PrefixNode(parent, content, key)
        self._buckets.setdefault(key, []).append(node)
        if parent is not None:
            parent.n_children += 1
        return node
