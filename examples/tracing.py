"""Traces to Jaeger, or to any other OTLP collector: python examples/tracing.py [ENDPOINT]

Start Jaeger, run this, open http://localhost:16686 and search the service "parcels" for the tag
paceline.slo.met=false: the second turn has a budget that nothing can meet.
"""

import sys
import time

import paceline
import paceline.tracing


def run(client: paceline.Client) -> None:
    for slo in (paceline.SLO(ttft_ms=5000, tpot_ms=500, e2e_ms=10_000), paceline.SLO(ttft_ms=1)):
        with client.turn("triage", slo=slo) as turn:
            with turn.tool("look_up", attributes={"table": "parcels"}):
                time.sleep(0.02)
            turn.generate("Where is my parcel?", max_tokens=12)
        blame = [verdict.blame for verdict in turn.report.verdicts if not verdict.met]
        print(f"trace {turn.trace_id}: {'met' if turn.report.met else f'missed, blame {blame}'}")


if __name__ == "__main__":
    endpoint = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:4317"
    with (
        paceline.tracing.configure(endpoint=endpoint, service_name="parcels"),
        paceline.Client() as client,
    ):
        run(client)
