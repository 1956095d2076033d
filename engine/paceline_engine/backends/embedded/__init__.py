"""This project's torch engine, hosted in a worker process of the client's own.

``config`` what is served · ``backend`` the client's face · ``stream`` one generation · ``supervisor``
restarts · ``session`` who waits for what · ``process`` and ``thread`` carry ``messages`` to the ``loop``
that steps the engine, in the ``worker`` · ``source`` opens the real engine, ``scripted`` one without a
model.
"""

from paceline_engine.backends.embedded.backend import EmbeddedBackend
from paceline_engine.backends.embedded.config import EmbeddedConfig

__all__ = ["EmbeddedBackend", "EmbeddedConfig"]
