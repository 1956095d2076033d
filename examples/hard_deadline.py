"""A stream that is cut off at its deadline. The text so far is kept."""

import asyncio

import paceline


async def run(client: paceline.AsyncClient) -> None:
    slo = paceline.SLO(ttft_ms=None, tpot_ms=None, e2e_ms=800, hard=True)
    async with client.turn("storyteller", slo=slo) as turn:
        stream = turn.stream("Tell me a long story about a lighthouse.", max_tokens=400)
        try:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        except paceline.DeadlineExpiredError as error:
            print(f"nothing was sent: {error}")
        except paceline.GenerationError as error:
            # A stall or a fault in mid-stream. What had come is in error.partial_text.
            print(f"\nended early after {len(error.partial_text)} characters: {error}")
        else:
            cut = stream.finish_reason == paceline.FinishReason.BUDGET
            print(f"\n\n{'cut off' if cut else 'done'} after {turn.report.e2e_ms:.0f} ms: ", end="")
            print(f"{len(stream.text)} characters, finish reason '{stream.finish_reason}'")


async def main() -> None:
    async with paceline.AsyncClient() as client:
        await run(client)


if __name__ == "__main__":
    asyncio.run(main())
