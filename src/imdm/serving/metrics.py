"""Metrics of the service in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from imdm.serving.engine import Engine

TEXT = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)  # seconds


class Metrics:
    """Requests by route and status, how long they took, how many there are now."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.within: Counter[float] = Counter()
        self.seconds = 0.0
        self.clients = 0

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds += seconds
        for bound in BOUNDS:
            self.within[bound] += seconds <= bound

    def text(self, engine: Engine) -> str:
        return "\n".join(self._lines(engine)) + "\n"

    def _lines(self, engine: Engine) -> Iterator[str]:
        total, counts = sum(self.requests.values()), engine.counts
        yield from _header_lines("requests_total", "counter", "Requests answered, by route and status.")
        for (route, status), many in sorted(self.requests.items()):
            yield f'imdm_requests_total{{route="{route}",status="{status}"}} {many}'
        yield from _header_lines("request_seconds", "histogram", "Seconds from a request to the end of its response.")
        for bound in BOUNDS:
            yield f'imdm_request_seconds_bucket{{le="{bound:g}"}} {self.within[bound]}'
        yield f'imdm_request_seconds_bucket{{le="+Inf"}} {total}'
        yield f"imdm_request_seconds_sum {self.seconds:.6f}"
        yield f"imdm_request_seconds_count {total}"
        for name, kind, about, value in (
            ("clients", "gauge", "Requests that are being answered.", self.clients),
            ("sequences_waiting", "gauge", "Sequences in the queue.", engine.waiting),
            ("sequences_running", "gauge", "Sequences that are being written.", engine.running),
            ("sequences_total", "counter", "Sequences written.", counts.sequences),
            (
                "sequences_dropped_total",
                "counter",
                "Sequences whose client left, or that took too long.",
                counts.dropped,
            ),
            ("sequences_failed_total", "counter", "Sequences that could not be written.", counts.failed),
            ("tokens_total", "counter", "Tokens written.", counts.tokens),
            ("evaluations_total", "counter", "Network evaluations.", counts.turns),
            ("evaluated_sequences_total", "counter", "Sequences in these evaluations.", counts.evaluated),
            ("busy_seconds_total", "counter", "Seconds in which the engine worked.", round(counts.busy, 6)),
        ):
            yield from _header_lines(name, kind, about)
            yield f"imdm_{name} {value}"


def _header_lines(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP imdm_{name} {about}"
    yield f"# TYPE imdm_{name} {kind}"
