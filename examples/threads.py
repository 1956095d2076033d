"""One sync client for many threads. Their generations share the engine's passes."""

from concurrent.futures import ThreadPoolExecutor

import paceline

QUESTIONS = ["What is a parcel?", "What is a customs form?", "What is a tracking number?"]


def ask(client: paceline.Client, question: str) -> paceline.Report:
    with client.turn("asker", slo=paceline.SLO(ttft_ms=500, tpot_ms=90, e2e_ms=4000)) as turn:
        turn.generate(question, max_tokens=16)
    return turn.report


def run(client: paceline.Client) -> None:
    with ThreadPoolExecutor(max_workers=len(QUESTIONS)) as pool:
        reports = list(pool.map(lambda question: ask(client, question), QUESTIONS))
    for question, report in zip(QUESTIONS, reports, strict=True):
        verdicts = ", ".join(f"{each.budget} {each.measured_ms:.0f} ms" for each in report.verdicts)
        print(f"{question:<28} {'met' if report.met else 'missed':<7} {verdicts}")


if __name__ == "__main__":
    with paceline.Client() as client:
        run(client)
