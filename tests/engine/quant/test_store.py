"""Converted weights on disk: made once, checked on the way back, never a reason to fail."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline_engine.errors import ModelLoadError
from paceline_engine.mode import Variant
from paceline_engine.model.spec import Activation, ModelSpec, RopeSpec
from paceline_engine.quant import store as store_module
from paceline_engine.quant.layout import embedding, matrices, vectors
from paceline_engine.quant.store import WeightStore

CACHED = (Variant.BF16, Variant.FP8, Variant.INT8, Variant.INT4)
SPEC = ModelSpec(
    family="llama",
    n_layers=2,
    hidden_size=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=50,
    context_tokens=64,
    norm_eps=1e-6,
    activation=Activation.SILU,
    rope=RopeSpec(theta=10000.0),
)


@dataclass(kw_only=True)
class CountingCheckpoint:
    """Random weights, with a count of the tensors that were read."""

    spec: ModelSpec = SPEC
    digest: str = "ab" * 32
    name: str = "counting"
    path: Path = Path("counting.gguf")
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reads: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        parts = [*matrices(self.spec), *vectors(self.spec), embedding(self.spec)]
        for part in parts:
            rows = part.shape[0] // len(part.sources)
            if len(part.sources) == 3:
                q, kv = self.spec.n_heads * self.spec.head_dim, self.spec.n_kv_heads * self.spec.head_dim
                sizes = [q, kv, kv]
            else:
                sizes = [rows] * len(part.sources)
            for source, size in zip(part.sources, sizes, strict=True):
                self.tensors[source] = torch.randn((size, *part.shape[1:]), generator=generator)

    def tensor_names(self) -> Iterable[str]:
        return self.tensors

    def tensor(self, name: str) -> Tensor:
        self.reads += 1
        return self.tensors[name]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(matrix.dequantize(), right[name].dequantize()) for name, matrix in left.items()
    )


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.safetensors")
    return path


@pytest.mark.parametrize("variant", CACHED)
def test_second_start_reads_no_tensor_of_the_checkpoint(variant: Variant, tmp_path: Path) -> None:
    """What comes from the cache equals what was converted, and the checkpoint is left alone."""
    first = CountingCheckpoint()
    made = WeightStore(first, directory=tmp_path).matrices(variant)
    second = CountingCheckpoint()
    found = WeightStore(second, directory=tmp_path).matrices(variant)
    assert first.reads > 0
    assert second.reads == 0
    assert same(made, found)


@pytest.mark.parametrize("variant", [Variant.BF16, Variant.INT8])
def test_stacking_rounds_like_single_matrices(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no text is used, the stacked q, k and v hold what each would hold alone."""
    from paceline_engine.quant import calibrated
    from paceline_engine.quant.matrix import pack

    monkeypatch.setattr(calibrated, "MAX_WEIGHTS", 0)
    checkpoint = CountingCheckpoint()
    stacked = WeightStore(checkpoint, directory=tmp_path).matrices(variant)["layers.1.qkv"].dequantize()
    alone = [
        pack(checkpoint.tensors[f"model.layers.1.self_attn.{head}_proj.weight"], variant).dequantize()
        for head in ("q", "k", "v")
    ]
    assert torch.equal(stacked, torch.cat(alone))


def test_the_reference_is_not_kept(tmp_path: Path) -> None:
    """fp32 is exact and leaves nothing on the disk."""
    checkpoint = CountingCheckpoint()
    found = WeightStore(checkpoint, directory=tmp_path).matrices(Variant.FP32)
    assert torch.equal(found["output"].dequantize(), checkpoint.tensors["lm_head.weight"])
    assert not list(tmp_path.rglob("*"))


TIED = dataclasses.replace(SPEC, tied_embeddings=True)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", [Variant.FP8, Variant.INT8, Variant.INT4])
def test_tokens_are_looked_up_in_bf16(spec: ModelSpec, variant: Variant, tmp_path: Path) -> None:
    """Low precisions have a bf16 table, also where it is tied to an output matrix that is rounded."""
    checkpoint = CountingCheckpoint(spec=spec)
    table = WeightStore(checkpoint, directory=tmp_path).embedding(variant)
    assert table is not None
    expected = checkpoint.tensors["model.embed_tokens.weight"].bfloat16().float()
    assert torch.equal(table.dequantize(), expected)


@pytest.mark.parametrize("variant", [Variant.FP32, Variant.BF16])
def test_unrounded_tied_matrices_are_the_table_too(variant: Variant, tmp_path: Path) -> None:
    """Tied, the output matrix is made of the embedding, and tokens are looked up in it as it is."""
    checkpoint = CountingCheckpoint(spec=TIED)
    store = WeightStore(checkpoint, directory=tmp_path)
    assert store.embedding(variant) is None
    expected = checkpoint.tensors["model.embed_tokens.weight"]
    if variant is Variant.BF16:
        expected = expected.bfloat16().float()
    assert torch.equal(store.matrices(variant)["output"].dequantize(), expected)


def test_a_tied_table_is_kept_once(tmp_path: Path) -> None:
    """Where the bf16 variant is kept, the table is read from its file, unless that file is damaged."""
    WeightStore(CountingCheckpoint(spec=TIED), directory=tmp_path).matrices(Variant.BF16)
    path = only_file(tmp_path)
    checkpoint = CountingCheckpoint(spec=TIED)
    table = WeightStore(checkpoint, directory=tmp_path).embedding(Variant.INT4)
    assert table is not None
    assert checkpoint.reads == 0
    assert only_file(tmp_path) == path
    expected = table.dequantize()
    _flip_one_bit(path)
    again = WeightStore(checkpoint, directory=tmp_path).embedding(Variant.INT4)
    assert again is not None
    assert checkpoint.reads == 1
    assert torch.equal(again.dequantize(), expected)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _noise(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


def _flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _break_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9:14] = b"}}}}}"
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _other_tensors(path: Path) -> None:
    save_file({"x": torch.zeros(3)}, path, metadata=_metadata(path))


def _no_metadata(path: Path) -> None:
    save_file({"x": torch.zeros(3)}, path)


def _other_digest(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) + 0 for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=_metadata(path) | {"digest": "cd" * 32})


def _fewer_tensors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) + 0 for name in list(file.keys())[1:]}
    header = _metadata(path) | {"crc32": store_module._checksum(tensors)}
    save_file(tensors, path, metadata=header)


def _other_shapes(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name)[:2] + 0 for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=_metadata(path) | {"crc32": store_module._checksum(tensors)})


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _empty,
        _noise,
        _flip_one_bit,
        _break_header,
        _folder,
        _other_tensors,
        _no_metadata,
        _other_digest,
        _fewer_tensors,
        _other_shapes,
    ],
)
def test_a_file_that_does_not_fit_is_converted_again(damage: Any, tmp_path: Path) -> None:
    """Damaged, foreign and incomplete files in the cache give the right weights all the same."""
    made = WeightStore(CountingCheckpoint(), directory=tmp_path).matrices(Variant.INT8)
    expected = {name: matrix.dequantize() for name, matrix in made.items()}
    damage(only_file(tmp_path))
    again = CountingCheckpoint()
    found = WeightStore(again, directory=tmp_path).matrices(Variant.INT8)
    assert again.reads > 0
    assert all(torch.equal(found[name].dequantize(), values) for name, values in expected.items())


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    """The start after the repair reads the cache again."""
    WeightStore(CountingCheckpoint(), directory=tmp_path).matrices(Variant.INT8)
    _flip_one_bit(only_file(tmp_path))
    WeightStore(CountingCheckpoint(), directory=tmp_path).matrices(Variant.INT8)
    third = CountingCheckpoint()
    WeightStore(third, directory=tmp_path).matrices(Variant.INT8)
    assert third.reads == 0


def test_a_checksum_is_compared_once_for_each_file(tmp_path: Path) -> None:
    """A file that was found right is read as it stands, until its size, time or inode tell of a change."""
    WeightStore(CountingCheckpoint(), directory=tmp_path).matrices(Variant.INT8)
    WeightStore(CountingCheckpoint(), directory=tmp_path).matrices(Variant.INT8)
    path = only_file(tmp_path)
    status = path.stat()
    _flip_one_bit(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    trusted, doubted = CountingCheckpoint(), CountingCheckpoint()
    WeightStore(trusted, directory=tmp_path).matrices(Variant.INT8)
    assert trusted.reads == 0
    os.utime(path)
    WeightStore(doubted, directory=tmp_path).matrices(Variant.INT8)
    assert doubted.reads > 0


def test_checkpoints_do_not_share_files(tmp_path: Path) -> None:
    """Another digest is another file, and both stay."""
    one = CountingCheckpoint()
    two = CountingCheckpoint(digest="cd" * 32)
    two.tensors["lm_head.weight"] += 1
    for checkpoint in (one, two):
        WeightStore(checkpoint, directory=tmp_path).matrices(Variant.BF16)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    found = WeightStore(one, directory=tmp_path).matrices(Variant.BF16)["output"]
    assert torch.equal(found.dequantize(), one.tensors["lm_head.weight"].bfloat16().float())


def test_a_new_format_takes_the_place_of_older_ones(tmp_path: Path) -> None:
    """Files of older formats of the same weights go; newer formats, other weights and strangers stay."""
    store = WeightStore(CountingCheckpoint(), directory=tmp_path)
    store.matrices(Variant.INT8)
    current = only_file(tmp_path)
    stem, number = current.stem.rsplit("-v", 1)
    names = {
        "older": f"{stem}-v{int(number) - 1}.safetensors",
        "its mark": f"{stem}-v{int(number) - 1}.checked",
        "oldest": f"{stem}-v0.safetensors",
        "newer": f"{stem}-v{int(number) + 10}.safetensors",
        "another variant": f"{stem.replace('int8', 'int4')}-v0.safetensors",
        "another checkpoint": f"{'cd' * 16}-int8-v0.safetensors",
        "a stranger": f"{stem}-vast.safetensors",
    }
    current.unlink()
    for name in names.values():
        (current.parent / name).write_bytes(b"x")
    store.matrices(Variant.INT8)
    left = {path.name for path in current.parent.iterdir()}
    kept = {"newer", "another variant", "another checkpoint", "a stranger"}
    assert left == {current.name, *(names[each] for each in kept)}


def test_an_older_file_that_is_being_read_stays_readable(tmp_path: Path) -> None:
    """Weights mapped from a file of an older format keep their values after it is removed."""
    store = WeightStore(CountingCheckpoint(), directory=tmp_path)
    expected = store.matrices(Variant.BF16)["output"].dequantize()
    current = only_file(tmp_path)
    older = current.with_name(current.name.replace(f"-v{store_module.FORMAT_VERSION}", "-v0"))
    current.rename(older)
    with safe_open(older, framework="pt") as file:
        mapped = file.get_tensor("output:data")
    store.matrices(Variant.BF16)
    assert not older.exists()
    assert torch.equal(mapped.float(), expected)


def test_a_full_disk_costs_only_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails the weights are there, and no partial file is left."""

    def full(tensors: object, path: Path, metadata: object = None) -> None:
        path.write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    checkpoint = CountingCheckpoint()
    found = WeightStore(checkpoint, directory=tmp_path).matrices(Variant.BF16)
    assert torch.equal(found["output"].dequantize(), checkpoint.tensors["lm_head.weight"].bfloat16().float())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_a_folder_costs_only_the_cache(tmp_path: Path) -> None:
    """A file where the cache folder should be is no reason to fail."""
    blocked = tmp_path / "taken"
    blocked.write_text("not a folder")
    found = WeightStore(CountingCheckpoint(), directory=blocked).matrices(Variant.INT8)
    assert "output" in found


def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PACELINE_CACHE moves the cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "elsewhere"))
    WeightStore(CountingCheckpoint()).matrices(Variant.INT8)
    assert only_file(tmp_path / "elsewhere").is_file()


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """Weights that do not fit the spec are a load error that names the tensor."""
    checkpoint = CountingCheckpoint()
    checkpoint.tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 95)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        WeightStore(checkpoint, directory=tmp_path).matrices(Variant.INT8)


@pytest.mark.parametrize("variant", [Variant.INT8, Variant.INT4, Variant.FP8])
def test_values_that_are_not_finite_are_a_load_error(variant: Variant, tmp_path: Path) -> None:
    """A NaN among the weights is damage to the checkpoint, named with its tensor, and nothing is kept."""
    checkpoint = CountingCheckpoint()
    checkpoint.tensors["lm_head.weight"][3, 4] = torch.nan
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        WeightStore(checkpoint, directory=tmp_path).matrices(variant)
    assert not list(tmp_path.rglob("*.safetensors"))
