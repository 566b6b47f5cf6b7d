"""POST /debug/cache: what the prefix cache has of a prompt, block by block, and why not the rest.

The body is one of a chat or of a completion; nothing of it is computed.
"""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.events import Difference, Explanation, Fares, Stretch
from octavo.engine.door import Ticket
from octavo.observe.explain import cache_summary, fares
from octavo.serve import chat, completions
from octavo.serve.errors import json_response
from octavo.serve.requests import json_object, parse, read_body
from octavo.serve.service import Service


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a prompt, from `start` up to before `stop`, which fare the same way: see
    `core.events.Stretch`. They left the cache `ago_s` before now. `text` says it in words."""

    start: int
    stop: int
    why: Fares
    alike: int
    differs: Difference | None
    by: str
    ago_s: float | None
    plan_id: int | None
    text: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    block_size: int
    summary: str
    blocks: tuple[Blocks, ...]


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each prompt of the body."""

    prompts: tuple[Prompt, ...]


async def explain_cache(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await read_body(request, service.settings.max_body_bytes)
    tickets = await service.at_door(len(body), lambda: tickets_of(service, body))
    told = [await service.explain(ticket) for ticket in tickets]
    return json_response(Explained(prompts=tuple(map(_prompt, told))))


def tickets_of(service: Service, body: bytes) -> Sequence[Ticket]:
    """What would be asked of the engine, were the body sent to its own endpoint.

    Raises  RequestError.
    """
    defaults = service.settings.defaults
    if "messages" in json_object(body):
        talk, params = parse(body, chat.BODY, defaults)
        service.model_named(talk.model)
        return [chat.ticket_of(service, talk, params, chat.talk_of(talk))]
    asked, params = parse(body, completions.BODY, defaults)
    service.model_named(asked.model)
    return [
        service.door.completion(prompt, params)
        for prompt in completions.split_prompts(asked.prompt)
    ]


def _prompt(told: Explanation) -> Prompt:
    return Prompt(
        prompt_tokens=told.prompt_tokens,
        cached_tokens=told.cached_tokens,
        block_size=told.block_size,
        summary=cache_summary(told),
        blocks=tuple(_blocks(stretch, told.asked_s) for stretch in told.stretches),
    )


def _blocks(stretch: Stretch, now: float) -> Blocks:
    return Blocks(
        start=stretch.start,
        stop=stretch.stop,
        why=stretch.why,
        alike=stretch.alike,
        differs=stretch.differs,
        by=stretch.by,
        ago_s=None if stretch.at_s is None else now - stretch.at_s,
        plan_id=stretch.plan_id,
        text=fares(stretch, now),
    )
