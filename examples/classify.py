"""Choosing among labels in one prefill, without decoding."""

import paceline

LABELS = ["billing", "delivery", "technical"]
INQUIRIES = [
    "I was charged twice this month.",
    "My parcel has not arrived yet.",
    "The app crashes when I open it.",
]


def classify(turn: paceline.Turn, inquiry: str) -> paceline.Choice:
    # The part that is the same for all inquiries comes first: the prefix cache serves it from the second on.
    prompt = f"Sort customers' inquiries into {', '.join(LABELS)}.\n\nInquiry: {inquiry}\nLabel:"
    return turn.choose(prompt, options=LABELS)


def run(client: paceline.Client) -> None:
    for inquiry in INQUIRIES:
        with client.turn("sorter", slo=paceline.SLO(e2e_ms=500)) as turn:
            label = classify(turn, inquiry)
        share = label.probabilities[label]
        met = "in time" if turn.report.met else "late"
        print(f"{label:<10} {share:4.0%}  {turn.report.e2e_ms:5.0f} ms {met}  {inquiry}")


if __name__ == "__main__":
    with paceline.Client() as client:
        run(client)
