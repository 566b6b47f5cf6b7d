"""A batch: a file of requests, answered by the application that a server runs, without a socket.

a line ──▶ job ──▶ application ──▶ engine        at most `in_flight` at once: they share steps
a line ◀── answer ◀──┘                           in the order in which they end
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from octavo.config import EngineConfig, Sources
from octavo.engine.build import Prepared, prepare
from octavo.errors import EngineStopped, InvalidRequest, OctavoError
from octavo.serve.app import create_app
from octavo.serve.batch_files import (
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    Intake,
    Job,
    Output,
    count_lines,
    read_lines,
)
from octavo.serve.dialect import openai_error
from octavo.serve.main import engine_client, log_settings, settings_of
from octavo.units import KIB

logger = logging.getLogger(__name__)

ENVELOPE_BYTES = 64 * KIB
"""What a line may have beside its body."""


@dataclass(slots=True)
class Count:
    """How far a batch is. `lines` is None where nobody knows how many there are."""

    lines: int | None
    earlier: int = 0
    """Lines whose answers were there before."""
    answers: int = 0
    errors: int = 0
    """Of the answers."""
    tokens: int = 0

    def add(self, answer: BatchAnswer) -> None:
        self.answers += 1
        self.errors += answer.error is not None
        self.tokens += _tokens_of(answer.response.body)


Told = Callable[[Count], None]


def run_batch(
    config: EngineConfig,
    sources: Sources,
    source: Path,
    target: Path,
    *,
    in_flight: int | None = None,
    told: Told = lambda count: None,
) -> Count:
    """Answer every line of `source` that `target` has no answer to; `told` hears of each.

    So many are `in_flight` at once, twice as many as the engine computes if it is not said.
    Raises   SetupError: a file, the model or a setting cannot be used.
             EngineStopped: the engine could not be started again; a later run goes on.
    """
    count = Count(count_lines(source))
    if target.exists() and source.samefile(target):
        raise InvalidRequest(f"{source} is both input and output; give another output")
    config = replace(
        config, max_queued_requests=None, max_queued_tokens=None, max_queue_time=None
    )  # the next line is read when there is room for it
    output = Output(target)
    try:
        prepared = prepare(config)
        log_settings(config, sources, prepared)
        lines = read_lines(source, config.max_body_size + ENVELOPE_BYTES)
        intake = Intake(lines, output.answered, output.refused)
        most = in_flight or 2 * prepared.resolved.limits.sequences
        asyncio.run(_with_engine(config, prepared, Batch(intake, output, count, told), most))
    finally:
        output.close()
    return count


async def _with_engine(
    config: EngineConfig, prepared: Prepared, batch: "Batch", in_flight: int
) -> None:
    client = engine_client(config, prepared)
    try:
        await client.launch()
        door = prepared.door(config)
        app = create_app(client, door, settings_of(config, prepared, door))
        client.on_death = app.state.metrics.take
        await client.start()
        await batch.run(app, in_flight)
    finally:
        await client.close()


class Batch:
    """Takes the jobs of an intake and writes their answers."""

    def __init__(self, intake: Intake, output: Output, count: Count, told: Told) -> None:
        self._intake = intake
        self._output = output
        self._count = count
        self._told = told

    async def run(self, app: ASGIApp, in_flight: int) -> None:
        """Returns when all lines have their answers.

        Raises   EngineStopped, ConfigError: nothing more can be answered, or written.
        """
        jobs = iter(self._intake)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(in_flight):
                    workers.create_task(self._work(app, jobs))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        self._tell()

    async def _work(self, app: ASGIApp, jobs: Iterator[Job]) -> None:
        for job in jobs:
            answer = await answer_to(app, job)
            self._output.write(answer)
            self._count.add(answer)
            self._tell()
            await asyncio.sleep(0)  # a line that is refused takes no time of the engine's

    def _tell(self) -> None:
        self._count.earlier = self._intake.skipped
        self._told(self._count)


async def answer_to(app: ASGIApp, job: Job) -> BatchAnswer:
    """The line for the output.

    Raises   EngineStopped: there is no engine any more; the line has no answer yet.
    """
    asked = job.asked
    if isinstance(asked, BatchRequest) and _streams(asked.body):
        asked = InvalidRequest("stream: a batch has whole answers; leave it out", param="stream")
    if isinstance(asked, OctavoError):
        return _answer(job, asked.status, msgspec.json.encode(openai_error(asked)))
    status, body = await post(app, asked.url, bytes(asked.body))
    if status == EngineStopped.status:
        raise EngineStopped(f"{_message(body)}; run it again to go on from here")
    return _answer(job, status, body)


def _answer(job: Job, status: int, body: bytes) -> BatchAnswer:
    error = None
    if status >= 400:
        told = msgspec.json.decode(body, type=_Failed).error
        error = BatchError(code=told.code, message=told.message)
    found = msgspec.json.decode(body, type=_Found)
    return BatchAnswer(
        id=job.id,
        custom_id=job.custom_id,
        response=BatchResponse(
            status_code=status, request_id=found.id or job.id, body=msgspec.Raw(body)
        ),
        error=error,
    )


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """What an application answers to a POST by a client that waits for it; status and body."""
    arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()
    status, answer = 500, bytearray()

    async def receive() -> Message:
        if not arrived:
            await never.wait()
        return arrived.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer.extend(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", b"%d" % len(body))],
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not answer:
            raise
        logger.exception("a request failed")  # which its answer says too
    return status, bytes(answer)


class _Detail(msgspec.Struct):
    message: str
    code: str | None = None


class _Failed(msgspec.Struct):
    error: _Detail


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Found(msgspec.Struct):
    """What of the answers of the endpoints is counted."""

    id: str | None = None
    usage: _Usage | None = None


class _Streaming(msgspec.Struct):
    stream: bool | None = None


def _streams(body: msgspec.Raw) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streaming).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # the endpoint tells what is wrong with it


def _tokens_of(body: msgspec.Raw) -> int:
    usage = msgspec.json.decode(body, type=_Found).usage
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens


def _message(body: bytes) -> str:
    return msgspec.json.decode(body, type=_Failed).error.message
