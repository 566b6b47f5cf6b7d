"""What became of answers, counted when each ends: how many, how long, for whom."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.budget import Limits
from octavo.core.events import Receipt
from octavo.core.request import Request
from octavo.observe import buckets
from octavo.observe.buckets import Bounds
from octavo.observe.histogram import Histogram
from octavo.observe.slo import targets_of, time_per_output_token, verdict_on
from octavo.observe.status import countable
from octavo.observe.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram `name`, and vLLM's names and bounds for the same, if it has one."""

    name: str
    help: str
    bounds: Bounds
    aliases: tuple[str, ...] = ()
    alias_bounds: Bounds = ()


def distributions(max_model_len: int) -> tuple[Distribution, ...]:
    """Of what answers took and were; those of tokens reach up to the longest there can be."""
    tokens = buckets.one_two_five(max_model_len)
    return (
        Distribution(
            "time_to_first_token_seconds",
            "Arrival to first token",
            buckets.FIRST_TOKEN_S,
            ("time_to_first_token_seconds",),
            buckets.VLLM_FIRST_TOKEN_S,
        ),
        Distribution(
            "time_per_output_token_seconds",
            "Mean time of a token of the answer after the first",
            buckets.TOKEN_S,
            ("request_time_per_output_token_seconds",),
            buckets.VLLM_TOKEN_S,
        ),
        _span("request_seconds", "e2e_request_latency_seconds", "Arrival to last token"),
        _span("request_queue_seconds", "request_queue_time_seconds", "Arrival to first admission"),
        _span(
            "request_prefill_seconds",
            "request_prefill_time_seconds",
            "First admission to first token",
        ),
        _span("request_decode_seconds", "request_decode_time_seconds", "First token to last token"),
        _span(
            "request_inference_seconds",
            "request_inference_time_seconds",
            "First admission to last token",
        ),
        _count("request_prompt_tokens", tokens, "Prompt tokens, once a request"),
        _count(
            "request_computed_prompt_tokens",
            tokens,
            "Prompt tokens that the prefix cache had not, once a request",
            "request_prefill_kv_computed_tokens",
        ),
        _count(
            "request_completion_tokens",
            tokens,
            "Tokens of the answer",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
        ),
        _count(
            "request_max_tokens",
            tokens,
            "Tokens that the answer could have at most, once a request",
            "request_params_max_tokens",
        ),
        _count(
            "request_branches",
            buckets.VLLM_BRANCHES,
            "Answers asked for, once a request",
            "request_params_n",
        ),
        Distribution(
            "request_preemptions",
            "Preemptions of the answer",
            buckets.PREEMPTIONS,
            ("request_num_preemptions",),
            buckets.VLLM_PREEMPTIONS,
        ),
        Distribution(
            "request_peak_blocks", "KV blocks in the tables of the answer at their longest", tokens
        ),
    )


def _span(name: str, alias: str, help: str) -> Distribution:
    return Distribution(name, help, buckets.REQUEST_S, (alias,), buckets.VLLM_REQUEST_S)


def _count(name: str, bounds: Bounds, help: str, *aliases: str) -> Distribution:
    return Distribution(name, help, bounds, aliases or (name,), bounds)


def values_of(request: Request, receipt: Receipt) -> Iterator[tuple[str, float]]:
    """What an answer adds to which distribution. What a request has once is on the receipt of its
    first answer."""
    yield "request_seconds", receipt.finished_s - receipt.arrival_s
    if receipt.admitted_s is not None:
        yield "request_queue_seconds", receipt.admitted_s - receipt.arrival_s
        yield "request_inference_seconds", receipt.finished_s - receipt.admitted_s
    if receipt.first_token_s is not None:
        yield "time_to_first_token_seconds", receipt.first_token_s - receipt.arrival_s
        yield "request_decode_seconds", receipt.finished_s - receipt.first_token_s
        if receipt.admitted_s is not None:
            yield "request_prefill_seconds", receipt.first_token_s - receipt.admitted_s
    tpot_s = time_per_output_token(receipt)
    if tpot_s is not None:
        yield "time_per_output_token_seconds", tpot_s
    yield "request_completion_tokens", receipt.completion_tokens
    yield "request_preemptions", receipt.preemptions
    yield "request_peak_blocks", receipt.peak_blocks
    if receipt.prompt_tokens:
        yield "request_prompt_tokens", receipt.prompt_tokens
        yield "request_computed_prompt_tokens", receipt.prompt_tokens - receipt.cached_tokens
        yield "request_max_tokens", request.max_tokens
        yield "request_branches", request.branches


class Answers:
    """The books about answers that ended.

    Keeps    each answer of an accepted request is in `ended` once; those with a receipt are in the
             distributions and sums; the sums over tenants are the sums over all.
    """

    def __init__(self, max_model_len: int) -> None:
        self.ended: Counter[str] = Counter()
        """By how they ended."""
        self.verdicts: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.dropped = 0
        """Values that could not be counted."""
        self.tenants = Tenants()
        self.histograms = {one.name: Histogram(one.bounds) for one in distributions(max_model_len)}

    def finished(self, reason: str, request: Request, receipt: Receipt, limits: Limits) -> None:
        """An answer has ended as it should."""
        self._end(reason, request, 1)
        served = self.tenants.of(request.tenant)
        verdict = verdict_on(request, receipt, limits)
        if verdict is not None:
            self.verdicts[verdict] += 1
            served.verdicts[verdict] += 1
        for name, value in values_of(request, receipt):
            if not self._is_good(value):
                continue
            self.histograms[name].add(value)
            if name == "request_queue_seconds":
                served.queue.add(value)
            elif name == "time_to_first_token_seconds":
                served.first_token.add(value)
        if self._is_good(receipt.prompt_tokens):
            self.prompt_tokens += receipt.prompt_tokens
            served.prompt_tokens += receipt.prompt_tokens
        if self._is_good(receipt.completion_tokens):
            self.completion_tokens += receipt.completion_tokens
            served.completion_tokens += receipt.completion_tokens
        if self._is_good(receipt.preemptions):
            served.preemptions += receipt.preemptions

    def lost(self, reason: str, request: Request, answers: int, limits: Limits) -> None:
        """So many answers of a request have ended without a receipt: the client went, or the engine
        failed. Only the latter misses a target."""
        self._end(reason, request, answers)
        if reason == "error" and targets_of(request, limits) != (None, None):
            self.verdicts["failed"] += answers
            self.tenants.of(request.tenant).verdicts["failed"] += answers

    def _end(self, reason: str, request: Request, answers: int) -> None:
        self.ended[reason] += answers
        self.tenants.of(request.tenant).answers[reason] += answers

    def _is_good(self, value: float) -> bool:
        good = countable(value)
        self.dropped += not good
        return good
