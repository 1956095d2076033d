"""Calibration on the real worker with a scripted engine: saved, read back, repaired."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

import paceline
from paceline import profiles
from paceline.calibrate import version
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Variant
from paceline_policies.profile import Profile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path


def embedded():
    return EmbeddedBackend(
        EmbeddedConfig(
            model="toy",
            host="thread",
            variants=(Variant.BF16, Variant.INT4),
            source="paceline_engine.backends.embedded.scripted",
            source_options={"step_s": 0.0005},
        )
    )


def start(profile="quick"):
    """Start and close a client; gives the progress that was reported, and the model."""
    seen = []

    async def main():
        client = paceline.AsyncClient(backend=embedded(), profile=profile, on_progress=seen.append)
        async with client:
            return client.models["embedded"]

    info = asyncio.run(main())
    return [each for each in seen if each.stage == "calibrate"], info


def test_first_start_calibrates_and_the_next_reads_the_file(cache):
    """The first start reports its calibration from 0 to 1, the 1 once; the second runs none."""
    progress, info = start()
    assert [each.done for each in progress] == sorted(each.done for each in progress)
    assert [each.done for each in progress if each.done >= 1] == [progress[-1].done]
    path = profiles.profile_path(info, version=version())
    saved = profiles.load(path, info, version=version())
    assert saved is not None
    assert set(saved.variants) == {Variant.BF16, Variant.INT4}
    assert saved.qualities[Variant.BF16].value == 1.0
    assert saved.qualities[Variant.INT4].n_tokens > 0
    assert (saved.qualities[Variant.INT4].kl_nats, saved.qualities[Variant.INT4].top1_agreement) == (0.0, 1.0)
    assert start()[0] == []
    assert [file.suffix for file in (cache / "profiles").iterdir()] == [".json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', "cut", "other model"])
def test_a_damaged_profile_is_made_anew(damage):
    """Whatever is wrong with the file, the client calibrates and writes a sound one."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    text = path.read_text()
    if damage == "cut":
        damage = text[: len(text) // 2]
    elif damage == "other model":
        damage = json.dumps(json.loads(text) | {"fingerprint": "another"})
    path.write_text(damage)
    assert start()[0] != []
    assert profiles.load(path, info, version=version()) is not None


def test_what_was_learned_is_saved_on_close():
    """A turn's timeline changes the saved profile."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    before = path.read_text()

    async def main():
        client = paceline.AsyncClient(backend=embedded(), profile="quick", tracing=False)
        async with client, client.turn() as turn:
            await turn.generate("hi", max_tokens=6)

    asyncio.run(main())
    assert path.read_text() != before
    assert Profile.from_dict(json.loads(path.read_text())).speed_facts == info.speed_facts


def test_a_cache_that_cannot_be_written_does_no_harm(cache, monkeypatch):
    """Where nothing can be saved the client works, and calibrates each time."""
    blocked = cache / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("PACELINE_CACHE", str(blocked))
    assert start()[0] != []
    assert start()[0] != []


def test_a_stale_profile_is_measured_anew_with_a_word_that_says_why(caplog):
    """What was measured with other kernels is not used, and the log names what has changed, once."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    saved = Profile.from_dict(json.loads(path.read_text()))
    facts = dict(info.speed_facts)
    assert set(facts) == {"model", "kernels"}
    path.unlink()
    old = replace(saved, fingerprint="other", speed_facts={**facts, "kernels": "slower ones"})
    former = path.with_name(f"{path.stem.rpartition('-')[0]}-0123456789abcdef.json")
    profiles.save(former, old)
    caplog.clear()
    assert start()[0] != []
    [told] = [each.getMessage() for each in caplog.records if each.name == "paceline"]
    assert told == "measuring toy on this machine anew: kernels was slower ones, is none"
    caplog.clear()
    assert start()[0] == []
    assert not caplog.records


def test_a_first_start_says_nothing_of_stale_profiles(caplog):
    """Without an earlier profile, or beside damaged ones, there is nothing to explain."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    path.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-0.json"))
    path.with_name(f"{path.stem.rpartition('-')[0]}-0.json").write_text("{")
    caplog.clear()
    assert start()[0] != []
    assert not [each for each in caplog.records if each.name == "paceline"]


def test_the_one_who_waits_takes_the_others_profile():
    """While another process calibrates, a client waits and reads what that one wrote."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    text = path.read_text()
    path.unlink()
    seen = []

    async def main():
        waiting = asyncio.Event()

        def on_progress(progress):
            seen.append(progress)
            if "another process" in progress.message:
                waiting.set()

        client = paceline.AsyncClient(backend=embedded(), profile="quick", on_progress=on_progress)
        with profiles.claim(path) as mine:
            assert mine
            starting = asyncio.create_task(client.start())
            await waiting.wait()
            path.write_text(text)
            await starting
        await client.aclose()

    asyncio.run(main())
    assert {each.message for each in seen if each.stage == "calibrate"} == {"another process is calibrating"}


def test_a_lock_left_by_a_dead_process_is_taken_over(cache):
    """An old lock stops nobody for long."""
    import os

    path = cache / "profiles" / "x.json"
    with profiles.claim(path) as first:
        assert first
        with profiles.claim(path) as second:
            assert not second
        old = time.time() - profiles.STALE_LOCK_S - 1
        os.utime(path.with_suffix(".lock"), (old, old))
        with profiles.claim(path) as third:
            assert third


def test_a_profile_of_ones_own_is_used_and_never_saved(cache):
    """A profile that is passed in goes before everything and leaves no file."""
    _, info = start()
    path = profiles.profile_path(info, version=version())
    profile = profiles.load(path, info, version=version())
    path.unlink()
    assert start(profile)[0] == []
    assert not path.exists()
    assert start("assume")[0] == []
    assert not path.exists()


def test_a_real_turn_streams_chooses_and_learns():
    """The worker's own stream, under a turn: text, choice, verdicts."""

    async def main():
        async with paceline.AsyncClient(backend=embedded(), profile="quick", tracing=False) as client:
            await client.warm("policy")
            async with client.turn() as turn:
                answer = await turn.generate("hi", max_tokens=5)
                label = await turn.choose("hi", options=["aa", "b"])
                async for _ in turn.stream("hi", max_tokens=1000):
                    break
            return answer, label, turn.report

    answer, label, report = asyncio.run(main())
    assert answer.text.split() == ["0", "1", "2", "3", "4"]
    assert label in ("aa", "b")
    assert [record.finish_reason for record in report.generations] == ["length", "stop", "cancelled"]
