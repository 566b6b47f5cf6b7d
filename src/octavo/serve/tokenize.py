"""POST /tokenize and /detokenize: between text and token ids, as vLLM has them."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.door import Door
from octavo.errors import InvalidRequest
from octavo.serve.errors import json_response
from octavo.serve.requests import Body, Neutral, messages_schema, parse, read_body
from octavo.serve.service import Service
from octavo.text.chat import ROLES, ending_of

NEUTRAL: Neutral = {
    "chat_template_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "tools": ([],),
}


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either a prompt or messages. `add_special_tokens` adds what the model wants around a prompt;
    a chat template spells it out, so that messages go without by default."""

    prompt: str | None = None
    messages: list[Any] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs` has the text of each token; a part of a character is U+FFFD."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


TOKENIZE_BODY = Body(
    shape=TokenizeRequest, neutral=NEUTRAL, details={"messages": messages_schema(ROLES)}
)
DETOKENIZE_BODY = Body(shape=DetokenizeRequest)


class Text(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids of a prompt, as they would be computed."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body, TOKENIZE_BODY, service.settings.defaults)
    service.model_named(asked.model)
    door = service.door_for(asked.chat_template)
    return json_response(await service.at_door(len(body), lambda: _tokens(door, asked)))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body, DETOKENIZE_BODY, service.settings.defaults)
    service.model_named(asked.model)
    text = await service.at_door(len(body), lambda: service.door.decode(asked.tokens))
    return json_response(Text(prompt=text))


def _tokens(door: Door, asked: TokenizeRequest) -> Tokens:
    ids = tuple(_ids(door, asked))
    texts = tuple(door.tokenizer.decode([one]) for one in ids) if asked.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=door.max_model_len, tokens=ids, token_strs=texts)


def _ids(door: Door, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if asked.messages is not None:
        ending = ending_of(asked.add_generation_prompt, asked.continue_final_message)
        text = door.render(asked.messages, ending)
        return door.encode(text, add_special=asked.add_special_tokens is True)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template"):
        if getattr(asked, name) is not None:
            raise InvalidRequest(f"{name} needs messages", param=name)
    assert asked.prompt is not None
    return door.encode(asked.prompt, add_special=asked.add_special_tokens is not False)
