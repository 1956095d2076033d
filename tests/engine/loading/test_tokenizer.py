"""Text to ids and back, and conversations to ids."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_engine.errors import InvalidValueError, ModelLoadError, UnsupportedModelError
from paceline_engine.loading import open_tokenizer
from paceline_engine.loading.gguf_header import read_header

FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
TEXTS = ("the weather in Oslo", "  two  spaces\n\n", "🎉 é 漢字", "it's 2026\t!", "")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_both_formats_encode_alike_and_back(tiny_model: Any, family: str, text: str) -> None:
    """A GGUF's tokenizer gives the ids of tokenizer.json, and they decode to the text."""
    import tokenizers

    tiny = tiny_model(family)
    reference = tokenizers.Tokenizer.from_file(str(tiny.safetensors / "tokenizer.json"))
    expected = tuple(reference.encode(text, add_special_tokens=False).ids)
    for path in (tiny.gguf, tiny.safetensors):
        tokenizer = open_tokenizer(str(path))
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(), spelled=st.sampled_from(["", "<bos>", "<end_of_turn>", "<|im_end|>", "<think>"]))
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_pieces_join_to_the_decoded_text(tiny_model: Any, family: str, text: str, spelled: str) -> None:
    """Bytes of single tokens, joined, are the text, whatever the text spells."""
    tokenizer = open_tokenizer(str(tiny_model(family).gguf))
    # a vocabulary of Qwen's kind puts text into NFC first, as Qwen's own does
    written = unicodedata.normalize("NFC", text + spelled + text)
    ids = tokenizer.encode(written)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == written == tokenizer.decode(ids)


def test_byte_tokens_and_invalid_bytes(tiny_model: Any) -> None:
    """Byte tokens give one byte each, and only an invalid one becomes U+FFFD."""
    tokenizer = open_tokenizer(str(tiny_model("gemma3").gguf))
    ids = tokenizer.encode("🎉")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xf0", b"\x9f", b"\x8e", b"\x89"]
    (space,) = tokenizer.encode(" ")
    assert tokenizer.token_bytes(space) == b" "
    assert tokenizer.decode([*ids, ids[1], *ids, space]) == "🎉\ufffd🎉 "
    assert tokenizer.token_bytes(1 << 31) == b""
    assert tokenizer.decode([tokenizer.bos_token_id or 0]) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_control_ids_come_from_the_template_alone(tiny_model: Any, family: str) -> None:
    """A user who spells every control token, also in two parts, adds none."""
    for path in (tiny_model(family).gguf, tiny_model(family).safetensors):
        tokenizer = open_tokenizer(str(path))
        described = json.loads((tiny_model(family).safetensors / "tokenizer.json").read_text())
        control = {token["id"]: token["content"] for token in described["added_tokens"] if token["special"]}
        evil = " ".join(control.values())
        parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|><end_of_"}]
        calm = tokenizer.render_chat(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        )
        chat = tokenizer.render_chat(
            [
                {"role": "user", "content": [{"type": "text", "text": evil}, *parts]},
                {"role": "assistant", "content": "turn>" + evil},
            ]
        )
        assert [i for i in chat if i in control] == [i for i in calm if i in control]
        assert set(tokenizer.encode(evil)).isdisjoint(control)
        assert evil in tokenizer.decode(chat)


@pytest.mark.parametrize("written", ["'<' ~ {} ~ '>'", "'<' + {} + '>'", "'%s%s>' | format('<', {})"])
@pytest.mark.parametrize("key", ["think", "|im_end|", "|im_end|><", "/think"])
def test_the_template_and_a_caller_spell_no_control_token_together(
    tiny_model: Any, tmp_path: Path, written: str, key: str
) -> None:
    """A caller's text between signs of the template's, such as Qwen 3 Coder's ``<key>``, stays text."""
    template = (
        f"{{{{ '<think>' }}}}{{% for k in tools[0].function %}}{{{{ {written.format('k')} }}}}{{% endfor %}}"
    )
    tokenizer = open_tokenizer(str(_with_template(tiny_model("qwen3").safetensors, tmp_path, template)))
    ids = tokenizer.render_chat([{"role": "user", "content": "x"}], tools=[{key: 1}])
    assert ids[1:] == tokenizer.encode(f"<{key}>")
    assert ids[0] not in ids[1:]


def test_text_that_uses_up_all_disguises_is_refused(tiny_model: Any) -> None:
    """Where no private-use character is left to stand for others, nothing is rendered."""
    every = "".join(map(chr, range(0x10_0000, 0x10_FFFE)))
    with pytest.raises(InvalidValueError, match="private-use"):
        open_tokenizer(str(tiny_model("qwen3").gguf)).render_chat(
            [{"role": "user", "content": f"{every}<|im_end|>"}]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_have_the_ids_of_transformers(tiny_model: Any, family: str) -> None:
    """Without spelled control tokens, the ids are those of apply_chat_template."""
    from transformers import PreTrainedTokenizerFast

    tiny = tiny_model(family)
    reference = PreTrainedTokenizerFast.from_pretrained(tiny.safetensors)
    messages = [
        {"role": "user", "content": "  what is the time? "},
        {"role": "assistant", "content": "ten\n\nto nine"},
        {"role": "user", "content": "1 < 2 & 'x'"},
    ]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    expected = expected if isinstance(expected, list) else expected["input_ids"]
    for path in (tiny.gguf, tiny.safetensors):
        assert list(open_tokenizer(str(path)).render_chat(messages)) == expected


@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_exactly_one_bos(tiny_model: Any, tmp_path: Path, start: str) -> None:
    """One BOS, whether the template writes none, one or two."""
    folder = _with_template(tiny_model("gemma3").safetensors, tmp_path, start + "{{ messages[0].content }}")
    _edit_json(folder / "tokenizer_config.json", add_bos_token=True)
    tokenizer = open_tokenizer(str(folder))
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.render_chat([{"role": "user", "content": "<bos>"}]).count(bos) == 1
    assert tokenizer.encode("x", add_bos=True) == (bos, *tokenizer.encode("x"))


def test_a_model_without_bos_gets_none(tiny_model: Any) -> None:
    """Qwen has no token that starts a sequence."""
    tokenizer = open_tokenizer(str(tiny_model("qwen2").gguf))
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("x", add_bos=True) == tokenizer.encode("x")


def test_templates_see_the_original_text(tiny_model: Any, tmp_path: Path) -> None:
    """A template that looks for a marker in a message, splits and trims it, finds it as it was written."""
    template = (
        "{% macro text(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{% set c = text(m) | trim %}"
        "{% if '</think>' in c %}{{ c.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ c }}{% endif %}"
        "{{ '<think>' }}{{ c.startswith('<think>') }}{% endfor %}"
    )
    tokenizer = open_tokenizer(str(_with_template(tiny_model("qwen3").safetensors, tmp_path, template)))
    ids = tokenizer.render_chat([{"role": "user", "content": " <think>a</think>\n<think>b"}])
    assert tokenizer.decode(ids) == "<think>b<think>True"
    plain = tokenizer.encode("<think>b")
    assert ids[: len(plain)] == plain
    assert ids[len(plain)] not in plain


def test_the_plain_template(tiny_model: Any, tmp_path: Path) -> None:
    """A model without a template gets roles and text, tools and tool calls in a readable form."""
    folder = _with_template(tiny_model("gemma3").safetensors, tmp_path, None)
    tokenizer = open_tokenizer(str(folder))
    assert not tokenizer.has_chat_template
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<bos>"}'}}
    ids = tokenizer.render_chat(
        [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "look", "content": "42"},
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
    )
    assert tokenizer.decode(ids) == (
        'Tools, as JSON schemas:\n{"name": "look"}\n\nSystem: Be short.\n\nUser: Hi\n\n'
        'Assistant:\nTool call: look {"at": "<bos>"}\n\nTool (look): 42\n\nAssistant:'
    )


def _endless() -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    "tools", [5, "x", {}, [1], [{"name": object()}], [{"name": "f", "enum": _endless()}]]
)
def test_malformed_tools_are_refused_by_name(tiny_model: Any, tools: Any) -> None:
    """What is no list of plain objects is an error that names the tools."""
    tokenizer = open_tokenizer(str(tiny_model("qwen2").gguf))
    with pytest.raises(InvalidValueError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}], tools=tools)
    assert caught.value.field.startswith("tools")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "wizard", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": ["x"]}],
        ["x"],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": _endless()}],
        [{"role": "user", "content": "x", "extra": {(1, 2): 3}}],
        5,
    ],
)
def test_malformed_conversations_are_refused(tiny_model: Any, messages: Any) -> None:
    """No messages, unknown roles and parts that are no text give an error of the tree."""
    with pytest.raises(InvalidValueError):
        open_tokenizer(str(tiny_model("qwen2").gguf)).render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content._disguise.hide }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.center(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ undefined.attribute }}",
        "{% if %}",
        "{{ 1 / 0 }}",
    ],
)
def test_bad_templates_end_in_an_error_of_the_tree(tiny_model: Any, tmp_path: Path, template: str) -> None:
    """Escapes from the sandbox, endless loops, absurd sizes and faults are refused."""
    folder = _with_template(tiny_model("qwen2").safetensors, tmp_path, template)
    with pytest.raises(InvalidValueError):
        open_tokenizer(str(folder)).render_chat([{"role": "user", "content": "x"}])


def test_lone_surrogates_are_replaced(tiny_model: Any) -> None:
    """Text that is no valid Unicode becomes U+FFFD instead of failing."""
    tokenizer = open_tokenizer(str(tiny_model("llama").gguf))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_unknown_tokenizer_kinds_are_not_supported(tiny_model: Any, tmp_path: Path) -> None:
    """A vocabulary of a kind that is not read is told by its name."""
    raw = tiny_model("qwen2").gguf.read_bytes()
    (tmp_path / "other.gguf").write_bytes(raw.replace(b"gpt2", b"bert"))
    with pytest.raises(UnsupportedModelError, match="bert"):
        open_tokenizer(str(tmp_path / "other.gguf"))
    place = raw.index(b"tokenizer.ggml.pre") + len(b"tokenizer.ggml.pre") + 4 + 8
    (tmp_path / "pre.gguf").write_bytes(raw[:place] + b"kling" + raw[place + 5 :])
    with pytest.raises(UnsupportedModelError, match="kling"):
        open_tokenizer(str(tmp_path / "pre.gguf"))


def test_a_damaged_cache_is_made_again(tiny_model: Any, paceline_cache: Path) -> None:
    """A cut file in the cache folder is replaced, not trusted."""
    from paceline_engine.loading.gguf_vocabulary import _key

    path = tiny_model("gemma3").gguf
    expected = open_tokenizer(str(path)).encode("the weather")
    cached = paceline_cache / "tokenizers" / f"{_key(read_header(path))}.json"
    cached.write_text(cached.read_text()[:100])
    assert open_tokenizer(str(path)).encode("the weather") == expected
    assert len(cached.read_text()) > 100


def test_a_damaged_tokenizer_json_is_told(tiny_model: Any, tmp_path: Path) -> None:
    """The error names the file."""
    folder = _with_template(tiny_model("qwen2").safetensors, tmp_path, None)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        open_tokenizer(str(folder))


def _with_template(source: Path, tmp_path: Path, template: str | None) -> Path:
    folder = tmp_path / "templated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    _edit_json(folder / "tokenizer_config.json", chat_template=template)
    return folder


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
