"""Grammars: compiled by llguidance, proven at the door, followed token by token in the runner.

    door     check     ─▶  compiled in time, or refused
    engine   prepare   ─▶  compiled in a thread, while the request waits for its turn
    runner   matcher   ─▶  a place in the grammar for one branch, at its start

Door and engine may live in two processes: what crosses is the text, and each compiles its own.
Nothing of llguidance is loaded before the first grammar comes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from octavo.core.request import Grammar, GrammarKind
from octavo.errors import InvalidRequest, Overloaded
from octavo.text.marks import marks_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from octavo.text.tokenizer import Tokenizer

TIMEOUT_S = 2.0
"""How long a grammar may take to compile."""
KEPT = 128
"""Compiled grammars that are kept, those used last."""
WORKERS = 2
MAX_STATES = 50_000
"""Of the automaton that reads the text; it grows where answers go, to some tens of megabytes."""
QUICK_S = 0.05
"""What compiles within this is compiled again for an answer that needs its own automaton."""
_SENTINEL = "\x02"
"""A character that meets no other in one token."""

Key = tuple[GrammarKind, str]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at its start, to be copied; or why there is none. It took so long to compile."""

    start: LLMatcher | None
    error: str = ""
    took_s: float = 0.0


class Matcher:
    """How far one answer has come in its grammar.

    Copies of a grammar share the automaton that reads the text, and with it the limit on its
    states: when others have used that up, this one gets an automaton of its own from `again`.
    Keeps    its state = a function of the grammar and the tokens appended, alone. It never raises:
             what goes wrong is its `error`, and stays.
    """

    __slots__ = ("_again", "_tokens", "barred", "ends", "error", "raw")

    def __init__(
        self,
        compiled: Compiled,
        tokens: Sequence[int] = (),
        *,
        ends: frozenset[int] = frozenset(),
        barred: frozenset[int] = frozenset(),
        again: Callable[[], LLMatcher] | None = None,
    ) -> None:
        self.raw = None if compiled.start is None else compiled.start.deep_copy()
        self.error = compiled.error
        self.ends = ends
        """The model's end tokens, which are in a mask where the answer may end."""
        self.barred = barred
        """Those of them that end nothing here."""
        self._again = again
        self._tokens: list[int] = []
        if tokens:
            self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens of the answer."""
        self._tokens += tokens
        if self.raw is not None and not self.raw.consume_tokens(list(tokens)):
            self.mend()

    def forced(self) -> list[int]:
        """The tokens that follow whatever is drawn, in the canonical tokenisation; often none."""
        if self.raw is None:
            return []
        found = self.raw.compute_ff_tokens()
        return self.forced() if self.mend() else found

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow."""
        if self.raw is None:
            return 0
        count = self.raw.validate_tokens(list(tokens))
        return 0 if self.mend() else count

    @property
    def ended(self) -> bool:
        """Nothing may follow."""
        return self.raw is not None and self.raw.is_stopped() and not self.raw.is_error()

    @property
    def accepts(self) -> bool:
        """The answer may end here."""
        return self.raw is not None and self.raw.is_accepting()

    def mend(self) -> bool:
        """After something was computed: whether it is to be done again, as it has gone wrong; with
        an automaton of its own this time, or not at all."""
        if self.raw is None or not self.raw.is_error():
            return False
        why, self.raw = _one_line(self.raw.get_error()), None
        again, self._again = self._again, None
        fresh = None if again is None else again()
        if fresh is not None and fresh.consume_tokens(self._tokens):
            self.raw = fresh
        else:
            self.error = f"the grammar cannot be followed any further: {why}"
        return True


class Grammars:
    """The grammars of one model, compiled when they are first asked for.

    `tokenizer` is asked for its vocabulary once, at the first grammar; `vocab_size` is the model's.
    Any thread may call.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        *,
        timeout_s: float = TIMEOUT_S,
        kept: int = KEPT,
        states: int = MAX_STATES,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._kept = kept
        self._states = states
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Key, Future[Compiled]] = OrderedDict()
        self._todo: SimpleQueue[tuple[Key, Future[Compiled]]] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._building = threading.Lock()
        self._built: tuple[LLTokenizer, LLParserLimits, frozenset[int]] | None = None

    def check(self, kind: GrammarKind, text: str) -> str:
        """Compile a grammar; why it cannot be used, "" if it can.

        Raises   Overloaded: others are being compiled for so long that this one was not begun.
        """
        self._vocabulary()  # a long way to go once, for which no grammar is to blame
        future = self._future((kind, text))
        try:
            return future.result(self._timeout_s).error
        except TimeoutError:
            if future.running():
                return self._too_long()
            raise Overloaded("other grammars are being compiled; try again") from None

    def prepare(self, grammar: Grammar) -> Future[Compiled]:
        """Begin to compile a grammar, if that is not done."""
        return self._future((grammar.kind, grammar.text))

    def matcher(self, grammar: Grammar, tokens: Sequence[int], stop_ids: frozenset[int]) -> Matcher:
        """The place in a grammar after these tokens of an answer. An end token of the model that is
        not among `stop_ids` ends nothing, and is not to be drawn.

        Waits until it is compiled.
        """
        future = self.prepare(grammar)
        compiled = future.result()
        _, _, ends = self._vocabulary()
        quick = compiled.took_s < QUICK_S
        again = partial(self._again, (grammar.kind, grammar.text), future) if quick else None
        return Matcher(compiled, tokens, ends=ends, barred=ends - stop_ids, again=again)

    # --- compiling

    def _future(self, key: Key) -> Future[Compiled]:
        with self._lock:
            future = self._compiled.get(key)
            if future is None:
                future = self._compiled[key] = Future()
                self._todo.put((key, future))
                self._hire()
            self._compiled.move_to_end(key)
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
            return future

    def _hire(self) -> None:
        """Daemons: one that is stuck in a grammar does not keep the process from ending."""
        if len(self._workers) < WORKERS:
            worker = threading.Thread(target=self._work, name="octavo-grammar", daemon=True)
            self._workers.append(worker)
            worker.start()

    def _work(self) -> None:
        while True:
            key, future = self._todo.get()
            if future.set_running_or_notify_cancel():
                future.set_result(self._compile(key))

    def _compile(self, key: Key) -> Compiled:
        try:
            tokenizer, limits, ends = self._vocabulary()
            began_s = time.monotonic()
            matcher = _compile(*key, tokenizer, limits)
            took_s = time.monotonic() - began_s
            if took_s > self._timeout_s:
                return Compiled(None, self._too_long())
        except Exception as error:  # whatever a conversion may raise
            return Compiled(None, _one_line(str(error)) or type(error).__name__)
        if matcher.is_error():
            return Compiled(None, _one_line(matcher.get_error()))
        if not _allows_text(matcher, ends):
            return Compiled(None, "it allows nothing but an empty answer")
        return Compiled(matcher, took_s=took_s)

    def _again(self, key: Key, used: Future[Compiled]) -> LLMatcher:
        """Another matcher, which shares nothing; nor will those who come later share `used`."""
        with self._lock:
            if self._compiled.get(key) is used:
                del self._compiled[key]
        tokenizer, limits, _ = self._vocabulary()
        return _compile(*key, tokenizer, limits)

    def _too_long(self) -> str:
        return f"it takes more than {self._timeout_s:g} s to compile; simplify it"

    def _vocabulary(self) -> tuple[LLTokenizer, LLParserLimits, frozenset[int]]:
        with self._building:
            if self._built is None:
                self._built = _build(self._tokenizer(), self.vocab_size, self._states)
            return self._built


def _compile(
    kind: GrammarKind, text: str, tokenizer: LLTokenizer, limits: LLParserLimits
) -> LLMatcher:
    """A matcher that has computed a mask: whatever is put off until then is done."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "regex":
        definition = LLMatcher.grammar_from_regex(text)
    elif kind == "json":
        definition = f'{{"grammars":[{{"json_schema":{text}}}]}}'
    else:
        definition = json.dumps({"grammars": [{"lark_grammar": any_to_lark(text)}]})
    matcher = LLMatcher(tokenizer, definition, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _allows_text(matcher: LLMatcher, ends: frozenset[int]) -> bool:
    """Whether anything may follow but an end token."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return bits & ~sum(1 << end for end in ends) != 0


def _build(
    tokenizer: Tokenizer, vocab_size: int, states: int
) -> tuple[LLTokenizer, LLParserLimits, frozenset[int]]:
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    # Of a model without end tokens another one stands in that is no text; it is never drawn.
    marks = tokenizer.eos_ids or sorted(tokenizer.special_ids)[:1]
    ends = frozenset(token for token in marks if token < vocab_size)
    if not ends:
        raise InvalidRequest("this model has no end token, which a grammar needs")
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, ends))
    limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
    return LLTokenizer(wrapper, eos_token=sorted(ends)), limits, ends


class _Vocabulary:
    """A tokenizer as llguidance looks at it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[bytes] = tokenizer.pieces(vocab_size)
        marks = frozenset(marks_of(tokenizer).values())
        self.special_token_ids = sorted(tokenizer.special_ids | ends | marks)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(ends)
        self._before = self._encode(_SENTINEL)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text in the middle of another: nothing is put before it."""
        if isinstance(text, bytes):
            text = text.decode()
        tokens = self._encode(_SENTINEL + text)
        whole = tokens[: len(self._before)] == self._before
        return tokens[len(self._before) :] if whole else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=False, add_special=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
