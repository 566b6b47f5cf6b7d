"""Session: a text that grows turn by turn, whose KV stays in the pool between the turns.

    root ── generate ──▶ root ── fork ──▶ a ── generate ──▶ a
                           │                                        a and b share the KV of root
                           └───── fork ──▶ b ── generate ──▶ b

It goes on from its own tokens, without computing any of them again as long as the pool has room;
when it has not, the answers are the same and take longer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.answer import Answer
from octavo.engine.door import Door, Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest, RequestError
from octavo.text.breakpoints import breakpoints_of
from octavo.text.detokenizer import Detokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session is about to ask: the ticket, and the conversation up to it.

    `text` is the rendered conversation; both are empty for plain text.
    """

    ticket: Ticket
    params: SamplingParams
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


class _Kept:
    """The blocks of a finished answer under a name, and how many sessions go on from them."""

    def __init__(self, name: str, drop: Callable[[str], None]) -> None:
        self.name = name
        self.users = 1
        self._drop = drop

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self._drop(self.name)


class Session:
    """A prompt and its answers so far; made by `LLM.session`.

    Close it, or use it as a context manager: what it holds in the pool is given back then. It is
    also given up when others need the room. Not for use from several threads at once.
    """

    def __init__(
        self,
        door: Door,
        serve: Callable[[Ticket], Answer],
        drop: Callable[[str], None],
        *,
        prompt: str | Sequence[int] = "",
        messages: Messages | None = None,
    ) -> None:
        self._door = door
        self._serve = serve
        self._drop = drop
        self._tokens: tuple[int, ...] = ()
        self._rest: str | Sequence[int] = prompt
        """What follows the tokens and is not encoded yet."""
        self._messages = None if messages is None else tuple(messages)
        self._text = ""
        """The conversation so far, as rendered and answered."""
        self._kept: _Kept | None = None
        self._closed = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of all prompts and answers so far, without those that were cut off a stop."""
        return self._tokens

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation so far; empty for plain text."""
        return self._messages or ()

    def generate(
        self, text: str | Sequence[int] = "", params: SamplingParams | None = None
    ) -> Answer:
        """Add `text` (or token ids), and continue.

        An answer that fails leaves the session as it was.
        Raises   RequestError: the text or a parameter cannot be honoured, or this is a chat.
        """
        return self._said(self.turn(text, params))

    def ask(self, content: str | Messages = (), params: SamplingParams | None = None) -> Answer:
        """The assistant's next message, after one more of the user's, or after some messages.

        An answer that fails leaves the session as it was.
        Raises   RequestError: a message or parameter cannot be honoured, or this is no chat.
        """
        return self._said(self.chat_turn(content, params))

    def fork(self) -> "Session":
        """A session of the same past, which goes on by itself; it costs no KV until it does."""
        self._check_open()
        child = Session(self._door, self._serve, self._drop)
        child._tokens, child._rest = self._tokens, self._rest
        child._messages, child._text = self._messages, self._text
        child._kept = self._kept
        if child._kept is not None:
            child._kept.users += 1
        return child

    def close(self) -> None:
        """Give back what it holds in the pool."""
        self._closed = True
        self._keep(None)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one turn

    def turn(self, text: str | Sequence[int], params: SamplingParams | None) -> Turn:
        """What `generate` asks."""
        self._check_open()
        if self._messages is not None:
            raise RequestError("this session is a chat: use ask")
        parts = [self._rest, text]
        if isinstance(self._rest, str) and isinstance(text, str):
            parts = [self._rest + text]  # one text: a token may span where the two meet
        tokens = self._tokens
        for part in parts:
            if isinstance(part, str):
                part = self._door.encode(part, add_special=not tokens) if part else ()
            tokens = (*tokens, *part)
        return self._turn(tokens, params)

    def chat_turn(self, content: str | Messages, params: SamplingParams | None) -> Turn:
        """What `ask` asks."""
        self._check_open()
        if self._messages is None:
            raise RequestError("this session is no chat: use generate, or give it messages")
        added = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = (*self._messages, *added)
        text = self._door.render(messages)
        if marks := breakpoints_of(messages):
            raise InvalidRequest(
                f"{marks[0].where}: a session keeps all of itself; leave it out",
                param=marks[0].where,
            )
        if self._text and text.startswith(self._text):
            rest = self._rest if isinstance(self._rest, str) else ""
            ids = self._door.encode(rest + text[len(self._text) :], add_special=False)
            tokens = (*self._tokens, *ids)
        else:  # the template changes what was said: it is encoded anew
            tokens = tuple(self._door.encode(text, add_special=False))
        return replace(self._turn(tokens, params), messages=messages, text=text)

    def _turn(self, tokens: Sequence[int], params: SamplingParams | None) -> Turn:
        params = params or self._door.defaults
        if params.n > 1:
            raise InvalidRequest(
                f"n is {params.n}: a session goes on from one answer; fork it instead", param="n"
            )
        if params.use_beam_search:
            raise InvalidRequest(
                "use_beam_search: a session goes on from one answer that is drawn; leave it out",
                param="use_beam_search",
            )
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs needs the whole prompt computed, which a session spares;"
                " leave it out",
                param="prompt_logprobs",
            )
        ticket = self._door.completion(tokens, params)
        after = None if self._kept is None else self._kept.name
        request = replace(ticket.request, keep=True, after=after)
        return Turn(replace(ticket, request=request), params)

    def _said(self, turn: Turn) -> Answer:
        answer = self._serve(turn.ticket)
        self.take(turn, answer)
        return answer

    def take(self, turn: Turn, answer: Answer) -> None:
        """Go on from this answer from now on, if it is one."""
        if answer.finish_reason not in ("stop", "length"):
            return
        own, self._rest = self._own(turn, answer)
        self._tokens = (*turn.ticket.request.prompt, *own)
        if self._messages is not None:
            self._messages = (*turn.messages, {"role": "assistant", "content": answer.text})
            self._text = turn.text + answer.text
        self._keep(turn.ticket.request.id)

    def _own(self, turn: Turn, answer: Answer) -> tuple[tuple[int, ...], str]:
        """The tokens of an answer that belong to its text, and the text that they lack: what has
        ended it is no part of it, and a stop string may begin in the middle of a token."""
        if answer.finish_reason == "length":
            return answer.token_ids, ""
        detokenizer = Detokenizer(
            self._door.tokenizer, skip_special=turn.params.skip_special_tokens
        )
        count = length = total = 0
        for index, token in enumerate(answer.token_ids, 1):
            piece = detokenizer.push(token)
            total += len(piece)
            if piece and total <= len(answer.text):
                count, length = index, total
        return answer.token_ids[:count], answer.text[length:]

    def _keep(self, name: str | None) -> None:
        if self._kept is not None:
            self._kept.leave()
        self._kept = None if name is None else _Kept(name, self._drop)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this session is closed; start another")
