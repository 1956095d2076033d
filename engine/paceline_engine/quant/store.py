"""Converted weights, kept on disk so that only the first start dequantizes and rounds.

One safetensors file holds one variant of one checkpoint; its header names the checkpoint's digest, the
format and a checksum of the data. A file that does not fit is made anew, and a disk that cannot be written
costs nothing but the next start's time. A new file takes the place of those of older formats.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline_engine.errors import InvalidValueError, ModelLoadError
from paceline_engine.kernels.packing import checked
from paceline_engine.loading.base import Checkpoint
from paceline_engine.loading.cache import cache_dir, write_atomically
from paceline_engine.mode import Variant
from paceline_engine.quant import layout
from paceline_engine.quant.calibrated import calibration_ids, is_worth_it, round_checkpoint
from paceline_engine.quant.layout import Part
from paceline_engine.quant.matrix import Matrix, pack, unpack

FORMAT_VERSION = "3"
"""Raised whenever the layout or the rounding of a variant changes."""
OnFraction = Callable[[float, str], None]
_SEPARATOR = ":"
_LOG = logging.getLogger(__name__)


class _DoesNotFitError(Exception):
    """A file in the cache is not what its name says."""


_UNUSABLE = (
    _DoesNotFitError,
    OSError,
    SafetensorError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    RuntimeError,
)
"""What opening, reading and assembling a file that is not ours can raise, torch's errors among it."""


class WeightStore:
    """Gives one checkpoint's weights in any variant, from the cache where it can.

    Args:
        directory: where converted weights are kept; None for the user's cache folder.
    """

    def __init__(self, checkpoint: Checkpoint, *, directory: Path | None = None) -> None:
        self._checkpoint = checkpoint
        self._directory = (cache_dir() if directory is None else directory) / "weights"

    def matrices(self, variant: Variant, *, on_fraction: OnFraction | None = None) -> dict[str, Matrix]:
        """The matrices of one variant by their name in ``layout``.

        Args:
            on_fraction: called with the share that is converted, where it is not cached.

        Raises:
            ModelLoadError: a tensor of the checkpoint is absent, damaged or of another shape.
        """
        parts = layout.matrices(self._checkpoint.spec)
        return self._load(str(variant), parts, variant, on_fraction)

    def has(self, variant: Variant) -> bool:
        """Whether a converted file of this variant lies in the cache; it may still turn out damaged."""
        return self._path(str(variant)).exists()

    def embedding(self, variant: Variant) -> Matrix | None:
        """The embedding table, bf16 or fp32; None where the variant looks tokens up in its output matrix.

        Errors as ``matrices``.
        """
        spec = self._checkpoint.spec
        if layout.looks_up_output(spec, variant):
            return None
        if spec.tied_embeddings:
            # The table is bf16's output matrix: no second copy of it where that variant is kept.
            output = layout.matrices(spec)[-1]
            kept = self._kept(str(Variant.BF16), (output,), Variant.BF16)
            if kept is not None:
                return kept[output.name]
        part = layout.embedding(spec)
        precision = Variant.FP32 if variant is Variant.FP32 else Variant.BF16
        return self._load("embedding", (part,), precision, None)[part.name]

    def vectors(self) -> dict[str, Tensor]:
        """Norms and biases by their name in ``layout``, fp32. Errors as ``matrices``."""
        return {part.name: self._source(part).float() for part in layout.vectors(self._checkpoint.spec)}

    def _load(
        self, kind: str, parts: tuple[Part, ...], precision: Variant, on_fraction: OnFraction | None
    ) -> dict[str, Matrix]:
        # The fp32 reference is for tests and comparisons: not worth a file larger than all others together.
        cached = precision is not Variant.FP32
        if cached and (kept := self._kept(kind, parts, precision)) is not None:
            return kept
        found = self._convert(parts, precision, on_fraction)
        if cached:
            self._write(self._path(kind), kind, _flatten(found))
        return found

    def _kept(self, kind: str, parts: tuple[Part, ...], precision: Variant) -> dict[str, Matrix] | None:
        """Parts from a file of the cache; None where there is none that can be used."""
        path = self._path(kind)
        try:
            return _assemble(parts, self._read(path, kind), precision) if path.exists() else None
        except _UNUSABLE as error:
            _LOG.warning("converting again, since %s cannot be used: %s", path, error)
            return None

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self._checkpoint.digest[:32]}-{kind}-v{FORMAT_VERSION}.safetensors"

    def _source(self, part: Part) -> Tensor:
        """What a part is made of, stacked, in the checkpoint's own type."""
        tensors = [self._checkpoint.tensor(name) for name in part.sources]
        n_rows = sum(tensor.shape[0] for tensor in tensors)
        for name, tensor in zip(part.sources, tensors, strict=True):
            if tensor.shape[1:] != part.shape[1:] or n_rows != part.shape[0]:
                raise ModelLoadError(
                    str(self._checkpoint.path),
                    reason=f"{list(tensor.shape)} does not fit {list(part.shape)}, which the metadata needs",
                    remedy="fetch the model again: its metadata and weights are not of one model",
                    tensor=name,
                )
        return tensors[0] if len(tensors) == 1 else torch.cat([item.float() for item in tensors])

    def _convert(
        self, parts: tuple[Part, ...], variant: Variant, on_fraction: OnFraction | None
    ) -> dict[str, Matrix]:
        total = sum(part.shape[0] * part.shape[1] for part in parts)
        done = 0

        def count(part: Part) -> None:
            nonlocal done
            done += part.shape[0] * part.shape[1]
            if on_fraction is not None:
                on_fraction(done / total, f"{variant}: {part.name}")

        if is_worth_it(self._checkpoint.spec, variant):

            def finite(part: Part) -> Tensor:
                with self._naming(part, variant):
                    return checked(self._source(part))

            return round_checkpoint(
                self._checkpoint,
                variant,
                source=finite,
                vectors=self.vectors(),
                sequences=calibration_ids(self._checkpoint),
                on_part=count,
            )
        found: dict[str, Matrix] = {}
        for part in parts:
            source = self._source(part)
            with self._naming(part, variant):
                found[part.name] = pack(source, variant)
            count(part)
        return found

    @contextmanager
    def _naming(self, part: Part, variant: Variant) -> Generator[None]:
        """Name the tensor whose values cannot be rounded."""
        try:
            yield
        except InvalidValueError as error:
            raise ModelLoadError(
                str(self._checkpoint.path),
                reason=f"its values cannot be rounded to {variant}: {error}",
                remedy="fetch the model again",
                tensor=part.sources[0],
            ) from error

    def _header(self, kind: str) -> dict[str, str]:
        return {"paceline": FORMAT_VERSION, "digest": self._checkpoint.digest, "kind": kind}

    def _read(self, path: Path, kind: str) -> dict[str, Tensor]:
        """The file's tensors, mapped into memory."""
        mark = _Mark(path)
        with safe_open(path, framework="pt") as file:
            opened: Any = file
            header: dict[str, str] = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        expected = self._header(kind)
        if {name: header.get(name) for name in expected} != expected:
            raise _DoesNotFitError("it was made from another checkpoint or by another version")
        if not mark.holds:
            if header.get("crc32") != _checksum(tensors):
                raise _DoesNotFitError("its checksum does not match its data")
            mark.set()
        return tensors

    def _write(self, path: Path, kind: str, tensors: dict[str, Tensor]) -> None:
        header = self._header(kind) | {"crc32": _checksum(tensors)}
        try:
            write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=header))
        except (OSError, SafetensorError) as error:
            _LOG.warning("the converted weights are not kept in %s: %s", path.parent, error)
        else:
            _remove_older(path)


def _remove_older(path: Path) -> None:
    """Remove what older formats left of the same weights. Who has such a file mapped keeps reading it."""
    stem, _, version = path.stem.rpartition("-v")
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            other_stem, _, other_version = other.stem.rpartition("-v")
            is_ours = other_stem == stem and other.suffix in (path.suffix, _Mark.SUFFIX)
            if is_ours and other_version.isdecimal() and int(other_version) < int(version):
                other.unlink(missing_ok=True)


class _Mark:
    """Tells that a file's checksum was found right, until the file is written again.

    The checksum takes as long as all else of reading, and guards against a copy or a write that broke off.
    So it is compared once for each file, known by its size, its time of change and its inode.
    """

    SUFFIX = ".checked"

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(self.SUFFIX)
        status = path.stat()
        self._identity = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"

    @property
    def holds(self) -> bool:
        try:
            return self._path.read_text(encoding="ascii") == self._identity
        except (OSError, ValueError):
            return False

    def set(self) -> None:
        """A disk that cannot be written costs only the time of the next comparison."""
        with contextlib.suppress(OSError):
            write_atomically(self._path, lambda draft: draft.write_text(self._identity, encoding="ascii"))


def _flatten(matrices: Mapping[str, Matrix]) -> dict[str, Tensor]:
    return {
        f"{name}{_SEPARATOR}{field}": tensor
        for name, matrix in matrices.items()
        for field, tensor in matrix.tensors().items()
    }


def _assemble(parts: Iterable[Part], tensors: Mapping[str, Tensor], variant: Variant) -> dict[str, Matrix]:
    """Undo ``_flatten``, checking that every part is there in its shape."""
    fields: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition(_SEPARATOR)
        fields.setdefault(name, {})[field] = tensor
    found: dict[str, Matrix] = {}
    for part in parts:
        if part.name not in fields:
            raise _DoesNotFitError(f"{part.name} is missing")
        matrix = unpack(fields[part.name], variant)
        if matrix.shape != part.shape:
            raise _DoesNotFitError(f"{part.name} has another shape")
        found[part.name] = matrix
    return found


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 over the tensors' bytes in the order of their names: for damage, not for malice."""
    checksum = 0
    for name in sorted(tensors):
        data = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(data.data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"
