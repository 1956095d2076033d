"""The LoRA adapters that an engine serves, and what of the prefix cache belongs to whom."""

from __future__ import annotations

from paceline_engine.cache.prefix import CacheScope
from paceline_engine.errors import UnknownOptionError
from paceline_engine.model.adapter import Adapter
from paceline_engine.model.base import ModelRunner


class Adapters:
    """Adapters by name. Any thread may call it: each change is one operation of a dictionary."""

    def __init__(self, runner: ModelRunner, *, model_fingerprint: str) -> None:
        self._runner = runner
        self._model_fingerprint = model_fingerprint
        self._loaded: dict[str, Adapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._loaded))

    def load(self, name: str, path: str) -> None:
        """See ``Engine.load_adapter``."""
        self._loaded[name] = self._runner.read_adapter(path)

    def unload(self, name: str) -> None:
        """See ``Engine.unload_adapter``."""
        self.get(name)
        self._loaded.pop(name, None)

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None for the model itself.

        Raises:
            UnknownOptionError: no adapter of that name is loaded.
        """
        if name is None:
            return None
        if (found := self._loaded.get(name)) is not None:
            return found
        raise UnknownOptionError(
            "adapter",
            observed=name,
            limit=f"one that is loaded ({', '.join(self.names) or 'none is'})",
            remedy="load it, or leave it out for the model itself",
        )

    def scope(self, adapter: Adapter | None, salt: str) -> CacheScope:
        """What shares cached prefixes: by the adapter's weights, whatever it is called."""
        digest = None if adapter is None else adapter.digest
        return CacheScope(model=self._model_fingerprint, adapter=digest, salt=salt)
