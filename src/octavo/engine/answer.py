"""Answer: what came of one prompt, for scripts."""

from dataclasses import dataclass

from octavo.core.events import FinishReason, Likeliest, Receipt, Score


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer: its text and tokens, why it ended, and what it cost.

    `logprobs` are the model's log-probabilities of the tokens, `top_logprobs` the likeliest tokens
    in place of each with theirs, if they were asked for; `prompt_logprobs` are the scores of the
    prompt's tokens from the second on, and stand in the first of its answers.

    With `n` > 1 this is the first of the prompt's `choices`. Their receipts sum to what the prompt
    cost: its own tokens stand in the first.

    A failure of the engine ends an answer with finish_reason "error" and `error` saying why; the
    other answers are not touched.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    receipt: Receipt
    error: str = ""
    others: tuple["Answer", ...] = ()
    top_logprobs: tuple[Likeliest, ...] = ()
    prompt_logprobs: tuple[Score, ...] = ()

    @property
    def choices(self) -> tuple["Answer", ...]:
        """All answers to the prompt, in the order of their branches; of one without `n`."""
        return (self, *self.others)
