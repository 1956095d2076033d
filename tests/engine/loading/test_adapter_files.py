"""LoRA folders as PEFT saves them: what is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from paceline_engine.loading import adapter_files
from paceline_engine.loading.adapter_files import read_adapter

Q = "model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of rank 2 on one projection, whose update is 3 * B @ A."""
    write(tmp_path, {Q: (torch.ones(2, 6), torch.full((4, 2), 0.5))}, lora_alpha=6)
    return tmp_path


def write(folder: Path, updates: dict[str, tuple[torch.Tensor, torch.Tensor]], **config: Any) -> None:
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": values
        for module, pair in updates.items()
        for side, values in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")


def change(folder: Path, **options: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options), encoding="utf-8")


def rewrite(folder: Path, edit: Edit) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_an_update_is_read_with_its_scale(folder: Path) -> None:
    """alpha / rank multiplies B @ A, under the name of the checkpoint's tensor."""
    found = read_adapter(str(folder)).updates
    assert set(found) == {f"{Q}.weight"}
    update = found[f"{Q}.weight"]
    assert (update.scale, update.down.shape, update.up.shape) == (3.0, (2, 6), (4, 2))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 10}}, 3.0),
        ({"alpha_pattern": {r".*self_attn\.q_proj": 4}}, 2.0),
    ],
)
def test_other_scales(folder: Path, options: dict[str, Any], scale: float) -> None:
    """Rank-stabilized scaling and alphas of single modules count as PEFT counts them."""
    change(folder, **options)
    assert read_adapter(str(folder)).updates[f"{Q}.weight"].scale == pytest.approx(scale)


def test_names_of_multimodal_checkpoints(tmp_path: Path) -> None:
    """An adapter that was trained inside a model with images names the same matrices."""
    for prefix in ("model.language_model.", "language_model.model."):
        write(tmp_path, {prefix + Q.removeprefix("model."): (torch.ones(1, 6), torch.ones(4, 1))})
        assert set(read_adapter(str(tmp_path)).updates) == {f"{Q}.weight"}


def test_the_digest_is_that_of_the_weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same files elsewhere have the same digest; one value or one option more, another."""
    first = read_adapter(str(folder)).digest
    copy = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert read_adapter(str(copy)).digest == first
    change(copy, lora_alpha=7)
    second = read_adapter(str(copy)).digest
    rewrite(copy, lambda tensors: next(iter(tensors.values())).add_(1))
    assert len({first, second, read_adapter(str(copy)).digest}) == 3


def test_no_adapter_there(tmp_path: Path) -> None:
    """A missing folder, and one without either file, are not found."""
    with pytest.raises(ModelNotFoundError, match=r"adapter_model\.safetensors"):
        read_adapter(str(tmp_path / "nowhere"))
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"adapter_config\.json"):
        read_adapter(str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"use_dora": True},
        {"use_something_new": True},
        {"alora_invocation_tokens": [5]},
        {"bias": "all"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"trainable_token_indices": [1, 2]},
    ],
)
def test_kinds_that_are_not_read(folder: Path, options: dict[str, Any]) -> None:
    """What would change the tensors' meaning is refused by its name, not left out."""
    change(folder, **options)
    with pytest.raises(UnsupportedModelError, match=next(iter(options))):
        read_adapter(str(folder))


@pytest.mark.parametrize("alpha", ["much", None, float("nan"), float("inf"), [1]])
def test_an_alpha_that_is_no_number(folder: Path, alpha: Any) -> None:
    """Refused by its name."""
    change(folder, lora_alpha=alpha)
    with pytest.raises(ModelLoadError, match="lora_alpha"):
        read_adapter(str(folder))


A, B = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (lambda tensors: tensors.pop(B), ModelLoadError, "pair"),
        (lambda tensors: tensors.update({B: torch.ones(4, 3)}), ModelLoadError, "rank"),
        (lambda tensors: tensors.update({B: torch.ones(4)}), ModelLoadError, "matrix"),
        (lambda tensors: tensors.update({A: torch.full((2, 6), torch.nan)}), ModelLoadError, "finite"),
        (lambda tensors: tensors.update({A: torch.ones(0, 6)}), ModelLoadError, "matrix"),
        (lambda tensors: tensors.clear(), ModelLoadError, "no tensors"),
        (lambda tensors: tensors.update({"other": torch.ones(1)}), UnsupportedModelError, "other"),
        (
            lambda tensors: tensors.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(4)}),
            UnsupportedModelError,
            "magnitude",
        ),
        (
            lambda tensors: tensors.update({"model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}),
            UnsupportedModelError,
            "embedding",
        ),
    ],
)  # fmt: skip
def test_damaged_weights(folder: Path, edit: Edit, error: type[Exception], words: str) -> None:
    """A file that does not hold whole pairs of finite matrices is refused by the tensor's name."""
    rewrite(folder, edit)
    with pytest.raises(error, match=words):
        read_adapter(str(folder))


@pytest.mark.parametrize("n_bytes", [0, 7, 30, -1])
def test_cut_files(folder: Path, n_bytes: int) -> None:
    """A file that was cut anywhere is a damaged one."""
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(ModelLoadError):
        read_adapter(str(folder))


def test_the_digest_is_of_what_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are written anew right after they were read do not give the old weights the new digest."""
    read, n_read = adapter_files.read_tensor, 0

    def read_and_replace(entry: Any) -> torch.Tensor:
        nonlocal n_read
        tensor, n_read = read(entry), n_read + 1
        if n_read == 2:
            rewrite(folder, lambda tensors: tensors.update({name: -tensors[name] for name in [*tensors][:1]}))
        return tensor

    monkeypatch.setattr(adapter_files, "read_tensor", read_and_replace)
    first, again, third = (read_adapter(str(folder)).digest for _ in range(3))
    assert first != again == third
