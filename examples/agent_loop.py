"""An agent loop of your own: choose a tool, call it, answer, all under one set of budgets."""

import asyncio
from collections.abc import Callable

import paceline

POLICY = "You help the customers of a parcel service. Answer in one short sentence."


def track(code: str) -> str:
    return f"Parcel {code} is in Oslo and is due on Friday."


def refund(code: str) -> str:
    return f"A refund for parcel {code} was started."


TOOLS: dict[str, Callable[[str], str]] = {"track": track, "refund": refund}


async def answer(client: paceline.AsyncClient, question: str, code: str) -> paceline.Report:
    messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": question}]
    async with client.turn("parcels", slo=paceline.SLO(ttft_ms=400, tpot_ms=60, e2e_ms=3000)) as turn:
        # Scoring the names takes one prefill: no tokens are generated, and the answer is always one of them.
        name = await turn.choose(messages, options=list(TOOLS))
        with turn.tool(name):
            found = TOOLS[name](code)
        messages.append({"role": "tool", "name": name, "content": found})
        async for chunk in turn.stream(messages, max_tokens=32, stop=["\n\n"]):
            print(chunk.text, end="", flush=True)
    return turn.report


async def run(client: paceline.AsyncClient) -> None:
    # Read the prefix that every turn shares into the cache, before anybody waits for it.
    await client.warm([{"role": "system", "content": POLICY}])
    report = await answer(client, "Where is my parcel A7?", "A7")
    print(f"\n\n{report}")


async def main() -> None:
    async with paceline.AsyncClient() as client:
        await run(client)


if __name__ == "__main__":
    asyncio.run(main())
