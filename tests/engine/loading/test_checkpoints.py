"""The two file formats give the same checkpoint, and damaged files are told by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_engine.errors import ModelError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from paceline_engine.loading import open_checkpoint, open_tokenizer
from paceline_engine.loading.gguf_header import read_header

FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0", "Q4_0"])
def test_both_formats_hold_the_same_tensors(tiny_model: Any, family: str, tensor_type: str) -> None:
    """Names, shapes, row order and norms agree between a GGUF and a safetensors folder."""
    import torch

    tiny = tiny_model(family, tensor_type=tensor_type)
    first, second = open_checkpoint(str(tiny.gguf)), open_checkpoint(str(tiny.safetensors))
    assert set(first.tensor_names()) == set(second.tensor_names())
    for name in first.tensor_names():
        assert first.tensor(name).shape == second.tensor(name).shape
        torch.testing.assert_close(first.tensor(name), second.tensor(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_specs_of_both_formats_agree_with_transformers(tiny_model: Any, family: str) -> None:
    """Sizes, layer types, windows, scales and end tokens are those of the reference's configuration."""
    tiny = tiny_model(family)
    config = tiny.reference.config
    for path in (tiny.gguf, tiny.safetensors):
        spec = open_checkpoint(str(path)).spec
        attention = tiny.reference.model.layers[0].self_attn
        assert spec.family == family
        assert spec.head_dim == attention.head_dim
        assert spec.attention_scale == pytest.approx(attention.scaling)
        assert spec.tied_embeddings == config.tie_word_embeddings
        assert spec.vocab_size == config.vocab_size
        assert spec.context_tokens == config.max_position_embeddings
        assert spec.bos_token_id == config.bos_token_id
        assert config.eos_token_id in spec.eos_token_ids
        assert spec.norm_eps == pytest.approx(config.rms_norm_eps)
        window = getattr(config, "sliding_window", None)
        assert spec.sliding_window == window
        if family == "gemma3":
            assert [f"{kind}_attention" for kind in spec.layer_kinds] == config.layer_types
            assert spec.local_rope is not None
            assert (spec.rope.theta, spec.local_rope.theta) == (1e6, 1e4)
        else:
            assert set(spec.layer_kinds) == {"sliding" if window else "full"}


def test_digest_changes_with_any_tensor(tiny_model: Any, tmp_path: Path) -> None:
    """The digest is the same for the same content and another for one changed tensor."""
    original = tiny_model("qwen3").gguf
    copy = tmp_path / original.name
    shutil.copy(original, copy)
    first = open_checkpoint(str(original)).digest
    assert open_checkpoint(str(copy)).digest == first
    last = max(read_header(copy).tensors.values(), key=lambda entry: entry.start)
    with copy.open("r+b") as file:
        file.seek(last.start)
        file.write(b"\x01\x02\x03\x04")
    assert open_checkpoint(str(copy)).digest != first


def test_a_gguf_cut_by_one_byte_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    """The error names the last tensor and is raised when opening."""
    raw = tiny_model("qwen2").gguf.read_bytes()
    last = max(read_header(tiny_model("qwen2").gguf).tensors.values(), key=lambda entry: entry.start)
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[: last.start + last.n_bytes - 1])
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(str(path))
    assert caught.value.tensor == last.name


def test_a_safetensors_cut_by_one_byte_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    """The error names a tensor and is raised when opening."""
    folder = _copy(tiny_model("qwen2").safetensors, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="ends at byte") as caught:
        open_checkpoint(str(folder))
    assert caught.value.tensor


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"offset": (1 << 64) - 32}, ModelLoadError, "ends at byte"),
        ({"offset": 7}, ModelLoadError, "multiple of the alignment"),
        ({"kind": 99}, UnsupportedModelError, "type id 99"),
        ({"kind": 10}, UnsupportedModelError, "type id 10"),
        ({"dims": (1 << 63, 1 << 63)}, ModelLoadError, "ends at byte"),
        ({"dims": (0, 4)}, ModelLoadError, "shape"),
        ({"n_dims": 9}, ModelLoadError, "dimensions"),
    ],
)
def test_a_bad_row_of_a_ggufs_table_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[ModelError], reason: str
) -> None:
    """Offsets that wrap around, unknown types and impossible shapes are told with the tensor's name."""
    row = {"dims": (32, 2), "kind": 0, "offset": 0} | change
    path = _raw_gguf(tmp_path, [("w", row)])
    with pytest.raises(error, match=reason) as caught:
        read_header(path)
    assert caught.value.tensor == "w"


def test_twins_and_overlaps_in_a_ggufs_table_are_refused(tmp_path: Path) -> None:
    """Two rows may neither share a name nor bytes."""
    row = {"dims": (32, 2), "kind": 0, "offset": 0}
    with pytest.raises(ModelLoadError, match="stands twice"):
        read_header(_raw_gguf(tmp_path, [("w", row), ("w", {**row, "offset": 256})]))
    with pytest.raises(ModelLoadError, match="lies within tensor 'w'"):
        read_header(_raw_gguf(tmp_path, [("w", row), ("v", {**row, "offset": 128})]))


@pytest.mark.parametrize("counts", [(1 << 63, 0), (1, 1 << 62), (0, 0)])
def test_absurd_counts_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    """A header that claims more than a file can hold is refused without looping over it."""
    path = tmp_path / "counts.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
    with pytest.raises(ModelLoadError):
        read_header(path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_gguf_versions_are_not_supported(tmp_path: Path, version: int) -> None:
    """Old, future and big-endian files are told by their version."""
    path = tmp_path / "version.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 1, 0) + bytes(64))
    with pytest.raises(UnsupportedModelError, match="version"):
        read_header(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_ggufs_header_escapes_the_tree(tiny_model: Any, tmp_path: Path, data: Any) -> None:
    """Whatever stands in the header, opening gives a checkpoint or an error of the tree."""
    source = tiny_model("llama", tensor_type="Q4_0").gguf
    raw = bytearray(source.read_bytes())
    end = read_header(source).n_bytes
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end - 9))
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        raw[place : place + len(value)] = value
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(raw)
    for opened in (open_checkpoint, open_tokenizer):
        with contextlib.suppress(ModelError):
            opened(str(path))


_SIZES = st.one_of(st.integers(-(1 << 70), 1 << 70), st.none(), st.text(max_size=3), st.lists(st.integers()))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["model.norm.weight", "model.embed_tokens.weight"]),
    key=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=st.one_of(_SIZES, st.lists(_SIZES, max_size=3)),
)
def test_no_change_of_a_safetensors_header_escapes_the_tree(
    tiny_model: Any, tmp_path: Path, name: str, key: str, value: Any
) -> None:
    """Absurd shapes, offsets and types give an error of the tree."""
    folder = _copy(tiny_model("qwen2").safetensors, tmp_path)
    _edit_header(folder / "model.safetensors", lambda header: header[name].update({key: value}))
    with pytest.raises(ModelError):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 200_000_000])
def test_an_absurd_safetensors_header_length_is_refused(tiny_model: Any, tmp_path: Path, length: int) -> None:
    """The length is compared with the file before anything is read."""
    folder = _copy(tiny_model("qwen2").safetensors, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(length.to_bytes(8, "little") + weights.read_bytes()[8:])
    with pytest.raises(ModelLoadError, match="claims a header"):
        open_checkpoint(str(folder))


def test_overlapping_safetensors_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    """Two tensors may not share bytes."""

    def overlap(header: dict[str, Any]) -> None:
        header["model.layers.0.input_layernorm.weight"]["data_offsets"] = header[
            "model.layers.1.input_layernorm.weight"
        ]["data_offsets"]

    folder = _copy(tiny_model("qwen2").safetensors, tmp_path)
    _edit_header(folder / "model.safetensors", overlap)
    with pytest.raises(ModelLoadError, match="lies within tensor"):
        open_checkpoint(str(folder))


def test_a_tied_gguf_needs_no_output_matrix(tiny_model: Any) -> None:
    """Without output.weight the embedding is the output matrix."""
    checkpoint = open_checkpoint(str(tiny_model("gemma3").gguf))
    assert checkpoint.spec.tied_embeddings
    assert "lm_head.weight" not in checkpoint.tensor_names()


def test_an_absent_shard_is_named(tiny_model: Any, tmp_path: Path) -> None:
    """An index that names a file that is not there fails with the file's name."""
    folder = _sharded(tiny_model("qwen3").safetensors, tmp_path)
    assert open_checkpoint(str(folder)).tensor("model.norm.weight").shape == (64,)
    (folder / "second.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"second\.safetensors") as caught:
        open_checkpoint(str(folder))
    assert caught.value.tensor


def test_a_missing_and_an_unknown_tensor_are_named(tiny_model: Any, tmp_path: Path) -> None:
    """A tensor that the configuration needs, or does not know, fails by name when opening."""
    folder = _copy(tiny_model("qwen3").safetensors, tmp_path)
    norm = "model.layers.1.self_attn.q_norm.weight"
    _edit_header(folder / "model.safetensors", lambda header: header.update({"extra": header.pop(norm)}))
    with pytest.raises(ModelLoadError, match="is missing") as missing:
        open_checkpoint(str(folder))
    assert missing.value.tensor == norm
    _edit_header(
        folder / "model.safetensors",
        lambda header: header.update({norm: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    )
    with pytest.raises(ModelLoadError, match="shape"):
        open_checkpoint(str(folder))


def test_gemma_norms_hold_the_whole_factor(tiny_model: Any) -> None:
    """Both formats give 1 + w, and w is what the reference stores."""
    import torch

    tiny = tiny_model("gemma3")
    stored = tiny.reference.state_dict()["model.layers.0.self_attn.q_norm.weight"]
    for path in (tiny.gguf, tiny.safetensors):
        read = open_checkpoint(str(path)).tensor("model.layers.0.self_attn.q_norm.weight")
        torch.testing.assert_close(read, stored + 1)


def test_a_folder_without_weights_is_not_found(tiny_model: Any, tmp_path: Path) -> None:
    """config.json alone is no model."""
    shutil.copy(tiny_model("qwen3").safetensors / "config.json", tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        open_checkpoint(str(tmp_path))


def _copy(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return folder


def _edit_header(path: Path, edit: Any) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _sharded(source: Path, tmp_path: Path) -> Path:
    from safetensors.torch import load_file, save_file

    folder = _copy(source, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"first.safetensors": names[::2], "second.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _raw_gguf(tmp_path: Path, rows: list[tuple[str, dict[str, Any]]]) -> Path:
    table = b""
    for name, row in rows:
        n_dims = row.get("n_dims", len(row["dims"]))
        dims = struct.pack(f"<{len(row['dims'])}Q", *row["dims"])
        table += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", n_dims) + dims
        table += struct.pack("<IQ", row["kind"], row["offset"])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(rows), 0) + table
    path = tmp_path / "raw.gguf"
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(1024))
    return path
