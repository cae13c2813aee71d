"""The daemon's HTTP endpoint as Prometheus reads it."""

from __future__ import annotations

import http.client

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """(status, content type, body) of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> Samples:
    """Samples by name and labels, as Prometheus' parser reads them."""
    status, content_type, text = get(port, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    found = [value for (one, its), value in samples.items() if one == name and labels.items() <= dict(its).items()]
    return sum(found)
