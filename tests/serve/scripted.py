"""A client that answers from a script, and a server around it on a real socket."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import uvicorn
from tests.text.vocabulary import metadata_of

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Ceilings, Limits
from octavo.core.events import (
    Explanation,
    Finished,
    FinishReason,
    PromptScored,
    Receipt,
    Score,
    Stretch,
    Token,
)
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.door import Door, Ticket
from octavo.engine.engine import Engine, EngineStatus
from octavo.engine.limits import changed
from octavo.engine.showing import BlockShown, PoolShown, show_block, show_pool
from octavo.observe.buckets import STEP_TOKENS, TOKEN_S
from octavo.observe.explain import Account, account
from octavo.observe.histogram import nothing
from octavo.observe.lives import Lives
from octavo.observe.tracing import Tracing
from octavo.serve.app import create_app
from octavo.serve.protocol import BoundedProtocol, Bounds
from octavo.serve.service import AboutModel, ServeSettings
from octavo.simulate.oracle import OracleRunner
from octavo.text.assembler import Delta, Ended
from octavo.text.tokenizer import Tokenizer
from octavo.units import ceil_div

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|other|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
CONTEXT = 512

IDLE = EngineStatus(
    running=0,
    waiting=0,
    blocks_total=100,
    blocks_free=60,
    blocks_cached=30,
    blocks_owned=10,
    blocks_held=0,
    blocks_pinned=0,
    blocks_fenced=0,
    table_entries=12,
    swap_blocks_total=12,
    swap_blocks_used=3,
    steps=7,
    tokens_computed=1000,
    tokens_sampled=90,
    tokens_drafted=8,
    tokens_accepted=6,
    tokens_recomputed=5,
    tokens_swapped_out=40,
    tokens_swapped_in=20,
    prompt_tokens=380,
    prompt_tokens_cached=250,
    admissions=5,
    preemptions=1,
    swaps=1,
    evictions=2,
    prefix_tokens_queried=400,
    prefix_tokens_hit=256,
    limits=Limits(sequences=8, tokens=64),
    ceilings=Ceilings(sequences=16, tokens=128, watermark_blocks=100),
    failed_steps=0,
    last_step_s=0.02,
    stepped_at_s=0.0,
    started_s=0.0,
    step_s=nothing(TOKEN_S),
    step_tokens=nothing(STEP_TOKENS),
    token_gaps_s=nothing(TOKEN_S),
)


ABOUT = AboutModel(
    reference="hf:org/model",
    architecture="llama",
    parameters=134_515_008,
    stored_as="Q8_0",
    weights_bytes=270_000_000,
    fingerprint="cafe",
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, three special tokens, a chat template."""
    return Tokenizer.from_gguf(metadata_of([]) | {"tokenizer.chat_template": TEMPLATE})


class Gate:
    """Stops the script at one token, until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.reached.set()
        await asyncio.to_thread(self._open.wait)


@dataclass
class Script:
    """The answer to a prompt. At token `pause_at` it waits for `gate`, at `fail_at` it raises."""

    text: str = "Hello from the scripted engine, ünïcödé 👩‍👧."
    reason: FinishReason = "stop"
    gate: Gate | None = None
    pause_at: int = 0
    error: Exception | None = None
    fail_at: int = 0


def idle_engine() -> Engine:
    """One that nobody asks to compute anything."""
    limits = Limits(sequences=4, tokens=16)
    oracle = OracleRunner(blocks=16, block_size=4, vocabulary=97)
    return Engine(Scheduler(BlockManager(blocks=16, block_size=4), limits), oracle)


class ScriptedClient:
    """Answers each prompt with the script's text, a token a byte, then the end token.

    A branch after the first has its number put before the text. The last one comes first. Each
    token has the log-probability -0.25; the next likely are those with the next ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.script: Script | Callable[[str], Script] = Script()
        self.tickets: list[Ticket] = []
        self.cancelled: list[str] = []
        self.was_cancelled = threading.Event()
        self.alive = True
        self.draining = False
        self.restarting = False
        self.busy_since_s: float | None = None
        self.state = IDLE
        self.lives = Lives()
        self.engine = idle_engine()

    def drain(self, on: bool = True) -> None:
        self.draining = on

    async def close(self) -> None:
        self.draining = True

    def status(self) -> EngineStatus:
        return self.state

    async def change_limits(self, changes: Mapping[str, object]) -> Limits:
        self.state = replace(self.state, limits=changed(self.state.limits, changes))
        return self.state.limits

    async def flush(self) -> int:
        return self.state.blocks_cached

    async def explain(self, request: Request) -> Explanation:
        length = len(request.prompt)
        return Explanation(length, 0, 16, (Stretch(0, ceil_div(length, 16), "never_seen"),), 0.0)

    async def accounts(self) -> tuple[Account, ...]:
        started_s = self.lives.started_s or 0.0
        return tuple(account(life, started_s, brief=True) for life in self.lives.all())

    async def find_account(self, name: str) -> Account | None:
        life = self.lives.find(name)
        return None if life is None else account(life, self.lives.started_s or 0.0)

    async def show_pool(self, *, most: int) -> PoolShown:
        return show_pool(self.engine, self.lives, most=most)

    async def show_block(self, block: int) -> BlockShown:
        return show_block(self.engine, self.lives, block)

    async def stream(self, ticket: Ticket) -> AsyncGenerator[Delta | Ended, None]:
        request = ticket.request
        self.tickets.append(ticket)
        prompt = self._tokenizer.decode(request.prompt)
        script = self.script if isinstance(self.script, Script) else self.script(prompt)
        finished = False
        try:
            for item in self._scores(ticket):
                yield item
            for branch in reversed(range(request.branches)):
                async for item in self._branch(ticket, script, branch):
                    finished = branch == 0 and isinstance(item, Ended)
                    yield item
        finally:
            if not finished:
                self.cancelled.append(request.id)
                self.was_cancelled.set()

    def _scores(self, ticket: Ticket) -> Iterator[Delta | Ended]:
        """Of the prompt, if that is asked: each token is the second likeliest."""
        request, count = ticket.request, ticket.request.prompt_logprobs
        if count is None:
            return
        scores = [
            Score(token, -1.5, 2, ((token + 1, -0.5), (token, -1.5), (token + 2, -2.5))[:count])
            for token in request.prompt[1:]
        ]
        for event in (
            PromptScored(request.id, 1, tuple(scores[:3])),
            PromptScored(request.id, 1, tuple(scores[:2])),  # of an engine that was started again
            PromptScored(request.id, 3, tuple(scores[2:])),
        ):
            yield from ticket.assemblers[0].take(event)

    async def _branch(
        self, ticket: Ticket, script: Script, branch: int
    ) -> AsyncGenerator[Delta | Ended, None]:
        request, assembler = ticket.request, ticket.assemblers[branch]
        text = f"{branch or ''}{script.text}"
        ids = self._tokenizer.encode(text, parse_special=True, add_special=False)
        stops = script.reason == "stop" and len(ids) < request.max_tokens
        ids = (ids + [0] * stops)[: request.max_tokens]
        for index, token in enumerate(ids):
            if script.gate and index == script.pause_at:
                await script.gate.passed()
            if script.error and index == script.fail_at:
                raise script.error
            if assembler.ended:
                break
            top = tuple((token + rank, -0.25 - rank) for rank in range(request.top_logprobs))
            for item in assembler.take(Token(request.id, index, token, -0.25, branch, top)):
                yield item
        reason = "stop" if stops else ("length" if script.reason == "stop" else script.reason)
        receipt = Receipt(
            prompt_tokens=0 if branch else len(request.prompt),
            completion_tokens=len(ids),
            cached_tokens=0 if branch else len(request.prompt) // 2,
            recomputed_tokens=3,
            preemptions=1,
            arrival_s=10.0,
            admitted_s=10.5,
            first_token_s=11.0,
            finished_s=12.0,
            peak_blocks=2,
        )
        message = "it broke" if reason == "error" else ""
        end = Finished(request.id, reason, 0 if stops else None, message, receipt, branch)
        for item in assembler.take(end):
            yield item


@dataclass
class Served:
    """A running server, and the client behind it."""

    url: str
    client: ScriptedClient
    door: Door


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextmanager
def serving(
    app: object, *, send_buffer: int = 0, unread_s: float = 0, bounds: Bounds | None = None
) -> Iterator[str]:
    """`app` on a free port, in a thread of its own; gives its address. The machine holds
    `send_buffer` bytes for a reader, and drops one that takes nothing for `unread_s`."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    if unread_s:
        unread_ms = int(unread_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    server = _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
            log_config=None,
            lifespan="on",
            timeout_keep_alive=600,  # a slow machine is no reason to hang up on a test
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert server.listening.wait(60)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


@contextmanager
def scripted_server(
    *,
    tracing: Tracing | None = None,
    send_buffer: int = 0,
    unread_s: float = 0,
    bounds: Bounds | None = None,
    **settings: object,
) -> Iterator[Served]:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=CONTEXT, vocab_size=tokenizer.vocab_size + 5)
    client = ScriptedClient(tokenizer)
    known = ServeSettings(model_names=("scripted", "org/alias"), version="1.2.3", about=ABOUT)
    told = replace(known, **settings)  # type: ignore[arg-type]
    app = create_app(client, door, told, tracing=tracing)
    with serving(app, send_buffer=send_buffer, unread_s=unread_s, bounds=bounds) as url:
        yield Served(url, client, door)
