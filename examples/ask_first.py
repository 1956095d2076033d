"""Predicting without running, and what to do when nothing fits."""

import dataclasses

import paceline

QUESTION = "Write down all rules for returning a parcel."


def run(client: paceline.Client) -> None:
    slo = paceline.SLO(ttft_ms=500, tpot_ms=60, e2e_ms=1500, on_infeasible="reject")
    with client.turn("clerk", slo=slo) as turn:
        decision = turn.plan(QUESTION, max_tokens=200)
        print(f"feasible: {decision.feasible}")
        for candidate in decision.candidates:
            print(f"  {candidate.mode.label:<12} p {candidate.p_meet:.2f}  {candidate.reason}")
        try:
            turn.generate(QUESTION, max_tokens=200)
        except paceline.InfeasibleError as error:
            # Nothing was run. The decision with all its numbers is in the error.
            remedy = error.decision.remedy
            print(f"refused; would fit: {remedy.change if remedy else 'nothing'}")

    # The same in one go: as long an answer as fits.
    with client.turn("clerk", slo=dataclasses.replace(slo, on_infeasible="shorten")) as turn:
        answer = turn.generate(QUESTION, max_tokens=200)
    print(f"{answer.decision.action}: {answer.usage.completion_tokens} tokens\n{answer}")


if __name__ == "__main__":
    with paceline.Client() as client:
        run(client)
