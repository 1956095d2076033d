"""A folder of ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT saves LoRA adapters.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from paceline_engine.loading.safetensors_dir import read_json, read_tensor, text_name
from paceline_engine.loading.safetensors_header import FETCH_AGAIN, read_header

if TYPE_CHECKING:
    import torch

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_NOT_READ: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
}
"""Options that change what the tensors mean, and the values at which they do not."""
_REMEDY = "train a plain LoRA adapter on the attention and feed-forward projections"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTensors:
    """What is added to one matrix W [N, K]: ``scale * B @ A``."""

    down: torch.Tensor
    """A [r, K], in the file's own type."""
    up: torch.Tensor
    """B [N, r]"""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensors:
    """An adapter as it stands on disk."""

    path: str
    digest: str
    """Of what was read: new weights under an old name have another."""
    updates: Mapping[str, LowRankTensors]
    """By the name of the checkpoint's tensor that each is added to."""


def read_adapter(path: str) -> AdapterTensors:
    """Read a LoRA adapter (Hu et al., 2021, https://arxiv.org/abs/2106.09685).

    Raises:
        ModelNotFoundError: no such folder, or no adapter in it.
        ModelLoadError: a file is damaged, or the two do not fit each other.
        UnsupportedModelError: another kind of adapter, or an option that is not supported.
    """
    folder = Path(path)
    if not (folder / _WEIGHTS).is_file():
        raise ModelNotFoundError(
            path, reason=f"has no {_WEIGHTS}", remedy=f"give a folder with {_CONFIG} and {_WEIGHTS}"
        )
    config = read_json(folder / _CONFIG)
    _check_kind(path, config)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in read_header(folder / _WEIGHTS).tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(path, tensor=name, reason="is no part of a LoRA", remedy=_REMEDY)
        is_matrix = len(entry.shape) == 2 and 0 not in entry.shape
        if not is_matrix or not bool((tensor := read_tensor(entry)).isfinite().all()):
            raise ModelLoadError(
                path, tensor=name, reason="is no matrix of finite values", remedy=FETCH_AGAIN
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise ModelLoadError(path, reason=f"{_WEIGHTS} holds no tensors", remedy=FETCH_AGAIN)
    updates = dict(_update(path, config, module, found) for module, found in sides.items())
    return AdapterTensors(path=path, digest=_digest(updates), updates=updates)


def _check_kind(path: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            path, reason=f"peft_type is {config.get('peft_type')!r}, and only LORA is read", remedy=_REMEDY
        )
    switches = {name: (False, None) for name in config if name.startswith("use_") and name != "use_rslora"}
    for option, plain in {**_NOT_READ, **switches}.items():
        if (value := config.get(option)) not in plain:
            raise UnsupportedModelError(
                path, reason=f"{option} is {value!r}, which is not supported", remedy=_REMEDY
            )


def _update(
    path: str, config: Mapping[str, Any], module: str, sides: Mapping[str, torch.Tensor]
) -> tuple[str, LowRankTensors]:
    if len(sides) < 2:
        (side,) = sides
        raise ModelLoadError(
            path, tensor=f"{module}.lora_{side}.weight", reason="stands without its pair", remedy=FETCH_AGAIN
        )
    down, up = sides["A"], sides["B"]
    rank = down.shape[0]
    if up.shape[1] != rank:
        raise ModelLoadError(
            path,
            tensor=module,
            reason=f"A {list(down.shape)} and B {list(up.shape)} have no rank in common",
            remedy=FETCH_AGAIN,
        )
    inner = module.removeprefix("base_model.model.")
    alpha = _alpha(path, config, inner)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return f"{text_name(inner)}.weight", LowRankTensors(down=down, up=up, scale=scale)


def _alpha(path: str, config: Mapping[str, Any], module: str) -> float:
    """``lora_alpha``, or what ``alpha_pattern`` has for the module's ending."""
    pattern = config.get("alpha_pattern") or {}
    try:
        found = next(
            (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)),
            config.get("lora_alpha"),
        )
        alpha = float(found)  # type: ignore[arg-type]  # pyright: ignore
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise ModelLoadError(
            path, reason=f"lora_alpha or alpha_pattern is no number ({error})", remedy=FETCH_AGAIN
        ) from error
    if not math.isfinite(alpha):
        raise ModelLoadError(path, reason=f"lora_alpha is {alpha}", remedy=FETCH_AGAIN)
    return alpha


def _digest(updates: Mapping[str, LowRankTensors]) -> str:
    """Of the tensors themselves: the files may have been written anew since they were read."""
    import torch

    digest = hashlib.sha256()
    for name, update in sorted(updates.items()):
        for side in (update.down, update.up):
            described = [name, update.scale, str(side.dtype), list(side.shape)]
            digest.update(json.dumps(described).encode())
            digest.update(side.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
