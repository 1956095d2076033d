"""What an install without extras can do, run by its own Python: ``make core``.

It plays a turn on the scripted backend, looks at what that imported, and asks for the embedded engine.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import paceline

HEAVY = ("torch", "vllm", "transformers", "tokenizers", "gguf", "safetensors", "jinja2")
COMMAND = "pip install 'paceline[engine]'"


async def turn() -> str:
    backend = paceline.testing.ScriptedBackend("Your flight leaves at nine.", prefill_ms=1, tpot_ms=1)
    async with paceline.AsyncClient(backend=backend) as client:
        async with client.turn(slo=paceline.SLO(ttft_ms=1000, tpot_ms=1000, e2e_ms=5000)) as turn:
            text = "".join([chunk.text async for chunk in turn.stream("When do I leave?", max_tokens=16)])
        verdicts = ", ".join(
            f"{each.budget} {'met' if each.met else 'missed'}" for each in turn.report.verdicts
        )
    return f"{text!r} ({verdicts})"


async def engine() -> paceline.PacelineError:
    client = paceline.AsyncClient()
    try:
        await client.start()
    except paceline.errors.MissingExtraError as error:
        return error
    finally:
        await client.aclose()
    raise SystemExit("AsyncClient() started without the engine extra")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    paceline_command = Path(sys.executable).with_name("paceline")
    return subprocess.run([paceline_command, *arguments], capture_output=True, text=True, check=False)


def check(holds: bool, what: str) -> None:
    print(f"{'ok' if holds else 'FAILED'}: {what}")
    if not holds:
        raise SystemExit(1)


def main() -> None:
    home = Path(paceline.__file__).parent
    check(home.is_relative_to(sys.prefix), f"paceline is imported from the wheel, in {home}")
    absent = [name for name in HEAVY if find_spec(name) is None]
    check("torch" in absent and "vllm" in absent, f"not installed here: {', '.join(absent)}")
    said = asyncio.run(turn())
    check("nine" in said, f"a turn on the scripted backend answered {said}")
    loaded = [name for name in HEAVY if name in sys.modules]
    check(not loaded, f"loaded of {', '.join(HEAVY)}: {', '.join(loaded) or 'none'}")
    error = asyncio.run(engine())
    check(COMMAND in str(error), f"AsyncClient() says: {error}")
    helped = command("--help")
    check(helped.returncode == 0 and "demo" in helped.stdout, "paceline --help works")
    refused = command("demo")
    check(
        refused.returncode == 2 and COMMAND in refused.stderr and refused.stderr.count("\n") == 1,
        f"paceline demo says, with exit status {refused.returncode}: {refused.stderr.strip()}",
    )


if __name__ == "__main__":
    main()
