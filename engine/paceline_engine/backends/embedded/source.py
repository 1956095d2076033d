"""Opens the real engine in the worker, and the tokenizer in the client."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_engine.backends.base import ModelInfo, OnProgress, Progress
from paceline_engine.backends.embedded.config import EmbeddedConfig
from paceline_engine.backends.embedded.loop import OpenedEngine
from paceline_engine.errors import InvalidValueError, MissingExtraError
from paceline_engine.loading.base import Tokenizer
from paceline_engine.model.base import SequenceSlice
from paceline_engine.schedule.base import StepPolicy

if TYPE_CHECKING:
    import torch

    from paceline_engine.model.runner import TorchRunner

_WARM_TOKENS = 4


def open_engine(
    config: EmbeddedConfig, *, step_policy: StepPolicy | None, on_progress: OnProgress
) -> OpenedEngine:
    """Load the checkpoint's variants and build the engine over them.

    Raises:
        ModelError: the model cannot be found, read or run.
        MissingExtraError: torch is not installed.
        InvalidValueError: a device that is not there.
    """
    on_progress(Progress(stage="load", done=0.0, message="importing torch"))
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("engine", needed_for="the embedded backend") from error
    from paceline_engine.core import Engine, EngineConfig
    from paceline_engine.loading import open_checkpoint
    from paceline_engine.loading import open_tokenizer as read_tokenizer
    from paceline_engine.loading.pieces import piece_tokenizer
    from paceline_engine.model.runner import TorchRunner

    torch.set_num_threads(config.threads)
    device = _device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # of this thread, which steps too: no other one is touched
    on_progress(Progress(stage="load", done=0.1, message=f"opening {config.model}"))
    checkpoint = open_checkpoint(config.model, on_progress)
    # The client encodes; here only tokens become text, which needs no whole tokenizer.
    tokenizer = piece_tokenizer(checkpoint.digest, lambda: read_tokenizer(config.model))
    runner = TorchRunner.load(
        checkpoint,
        variants=config.variants,
        device=device,
        n_blocks=config.blocks(context_tokens=checkpoint.spec.context_tokens),
        block_size=config.block_size,
        on_progress=on_progress,
        cache_dir=None if config.cache_dir is None else Path(config.cache_dir),
        lazy=config.lazy,
    )
    runner.load_unconverted(on_progress)
    on_progress(Progress(stage="load", done=0.9, message="first pass of each variant"))
    _warm(runner)
    runner.capture_decode(max_sequences=config.max_sequences, variants=runner.loaded)
    facts = speed_facts(checkpoint.digest, config)
    fingerprint = fingerprint_of(facts)
    engine = Engine(
        runner,
        tokenizer,
        config=EngineConfig(
            max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
            max_sequences=config.max_sequences,
            max_pinned_share=config.max_pinned_share,
            model_fingerprint=fingerprint,
        ),
        step_policy=step_policy,
    )
    for adapter, path in config.adapters.items():
        engine.load_adapter(adapter, path)
    on_progress(Progress(stage="load", done=1.0))
    info = ModelInfo(
        name=checkpoint.name,
        fingerprint=fingerprint,
        context_tokens=checkpoint.spec.context_tokens,
        vocab_size=checkpoint.spec.vocab_size,
        variants=config.variants,
        speculations=config.offered_speculations,
        bytes_per_variant=dict(runner.bytes_per_variant()),
        device=device.type,
        device_name=_device_name(device),
        speed_facts=facts,
        has_chat_template=tokenizer.has_chat_template,
    )

    def prepare_grammars() -> None:
        with contextlib.suppress(MissingExtraError):
            engine.prepare_grammars()

    return OpenedEngine(engine=engine, info=info, when_idle=None if config.lazy else prepare_grammars)


def check(config: EmbeddedConfig) -> None:
    """Raise at once what ``open_engine`` would raise in the worker, as far as it shows without torch.

    Raises:
        ModelError: nothing is at the model's path, or nothing that is read.
        MissingExtraError: torch, or a part that the model's name needs, is not installed.
    """
    from paceline_engine.loading import check as check_model

    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("engine", needed_for="the embedded backend")
    check_model(config.model)


def open_tokenizer(config: EmbeddedConfig) -> Tokenizer:
    """The model's tokenizer; needs no torch.

    Raises:
        ModelError: the model cannot be found, or its tokenizer not be read.
        MissingExtraError: the ``tokenizers`` package is not installed.
    """
    from paceline_engine.loading import open_tokenizer as read_tokenizer

    return read_tokenizer(config.model)


def _warm(runner: TorchRunner) -> None:
    """Run a prefill and a decode of each loaded variant, so that no turn pays for what happens once.

    That is the paging in of mapped weights and what libraries set up for a shape. The block that it
    writes is free and is written again before it is read.
    """
    n_tokens = min(_WARM_TOKENS, runner.block_size)
    for variant in runner.loaded:
        for token_ids, position in (((0,) * n_tokens, 0), ((0,), n_tokens - 1)):
            runner.forward([SequenceSlice(token_ids=token_ids, position=position, block_table=(0,))], variant)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    there = device is not None and (
        device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    )
    if device is None or not there:
        raise InvalidValueError(
            "device",
            observed=name,
            limit=f"'auto', 'cpu' or one of the CUDA devices that torch sees here ({_cuda_devices()})",
            remedy="'auto' takes CUDA where there is one, else the CPU",
        )
    return device


def _cuda_devices() -> str:
    import torch

    return ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count())) or "none"


def speed_facts(digest: str, config: EmbeddedConfig) -> dict[str, str]:
    """The weights and what else changes the speed or the last bits of the output, by name for people."""
    import torch

    from paceline_engine.kernels.selection import identity
    from paceline_engine.quant.store import FORMAT_VERSION

    device = _device(config.device).type
    facts = {
        "model": digest,
        "format of the weights": FORMAT_VERSION,
        "device": device,
        "threads": str(config.threads),
        "tokens per KV block": str(config.block_size),
        "PyTorch": torch.__version__,
    }
    return facts | {"kernels": identity()} if device == "cpu" else facts


def fingerprint_of(facts: Mapping[str, str]) -> str:
    """The digest of ``speed_facts``."""
    return hashlib.sha256("\0".join(facts.values()).encode()).hexdigest()[:32]


def _device_name(device: torch.device) -> str:
    """The processor, as its maker calls it."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
