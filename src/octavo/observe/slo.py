"""Whether an answer met its targets: goodput is the share of those that have any and met them."""

from typing import Literal, get_args

from octavo.core.budget import Limits
from octavo.core.events import Receipt
from octavo.core.request import Request

Verdict = Literal["met", "ttft_missed", "tpot_missed", "both_missed", "failed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def targets_of(request: Request, limits: Limits) -> tuple[float | None, float | None]:
    """Time to first token and time per output token that it should have: its own targets, or those
    of the limits."""
    ttft_s, tpot_s = request.ttft_target_s, request.tpot_target_s
    return (
        limits.ttft_target_s if ttft_s is None else ttft_s,
        limits.tpot_target_s if tpot_s is None else tpot_s,
    )


def verdict_on(request: Request, receipt: Receipt, limits: Limits) -> Verdict | None:
    """How an answer that ended fares; None if nothing was asked of it.

    An answer without a token is as late as its end. One of a single token has no time per output
    token, and is within any target for that.
    """
    ttft_target_s, tpot_target_s = targets_of(request, limits)
    if ttft_target_s is None and tpot_target_s is None:
        return None
    first_s = receipt.finished_s if receipt.first_token_s is None else receipt.first_token_s
    tpot_s = time_per_output_token(receipt)
    late = ttft_target_s is not None and first_s - receipt.arrival_s > ttft_target_s
    slow = tpot_target_s is not None and tpot_s is not None and tpot_s > tpot_target_s
    if late and slow:
        return "both_missed"
    if late:
        return "ttft_missed"
    return "tpot_missed" if slow else "met"


def time_per_output_token(receipt: Receipt) -> float | None:
    """The mean time of a token after the first; None if there is none."""
    if receipt.first_token_s is None or receipt.completion_tokens < 2:
        return None
    return (receipt.finished_s - receipt.first_token_s) / (receipt.completion_tokens - 1)
