"""Metrics in Prometheus' text format. Those that vLLM has too have its names, so that its dashboards show them."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets of durations."""

_TOKEN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper ends of the buckets of times per token."""

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
"""Upper ends of the buckets of numbers of tokens."""


class Metrics:
    """Counters, gauges and histograms of one server. They may be changed from any thread.

    Args:
        model: Name of the model, the label ``model_name`` of each metric.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        prometheus_client.disable_created_metrics()
        self._model = model
        self.running = self._gauge("vllm:num_requests_running", "Requests that run on the device: 0 or 1.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for the device.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts that were read.")
        self.new_tokens = self._counter("vllm:generation_tokens", "Tokens that were generated.")
        self.queue_seconds = self._histogram("vllm:request_queue_time_seconds", "Time in the queue.", _SECONDS)
        self.first_token_seconds = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token.", _SECONDS
        )
        self.token_seconds = self._histogram(
            "vllm:inter_token_latency_seconds", "Time per token after the first tokens of a choice.", _TOKEN_SECONDS
        )
        self.request_seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from the arrival of a request to the end of its answer.", _SECONDS
        )
        self.prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.text_sizes = self._histogram("vllm:request_generation_tokens", "Generated tokens of a choice.", _TOKENS)
        self._finished = Counter(
            "vllm:request_success", "Choices by the reason why they ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._errors = Counter(
            "onelaunch:request_errors", "Requests that ended with an error, by HTTP status.", ["model_name", "status"],
            registry=self._registry,
        )  # fmt: skip

    def finished(self, reason: str) -> None:
        """Count a choice that ended: by ``stop``, ``length`` or ``abort``."""
        self._finished.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """Count a request that ended with an error."""
        self._errors.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics as text."""
        return prometheus_client.generate_latest(self._registry)

    def _gauge(self, name: str, said: str) -> Gauge:
        return Gauge(name, said, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, said: str) -> Counter:
        return Counter(name, said, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, said, ["model_name"], registry=self._registry, buckets=buckets).labels(self._model)
