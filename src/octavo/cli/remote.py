"""octavo limits and octavo cache: what is asked of a running server, over HTTP."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from octavo.errors import EngineError, RequestError

TIMEOUT_S = 60


def limits(arguments: Namespace) -> int:
    """Print the limits that hold, after setting those that were named.

    Raises   RequestError: the server refuses; there is none at the address.
    """
    changes = dict(map(_change, arguments.changes))
    method = "PATCH" if changes else "GET"
    answer = ask(arguments, "/admin/limits", method, changes or None)
    sys.stdout.write(_table(answer["limits"], answer["ceilings"]))
    return 0


def explain_cache(arguments: Namespace) -> int:
    """Print what the server has cached of a prompt, and why not the rest.

    Raises   RequestError: the server refuses; there is none at the address.
    """
    answer = ask(arguments, "/debug/cache", "POST", _body(arguments))
    for prompt in answer["prompts"]:
        lines = [prompt["summary"], *(f"  {blocks['text']}" for blocks in prompt["blocks"])]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def flush_cache(arguments: Namespace) -> int:
    """Empty the cache of a server.

    Raises   RequestError: there is none at the address.
    """
    answer = ask(arguments, "/admin/cache/flush", "POST", {})
    sys.stdout.write(f"{answer['blocks_flushed']:,} blocks flushed\n")
    return 0


def _body(arguments: Namespace) -> dict[str, Any]:
    """The request whose prompt is meant."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.body:
        try:
            body = json.loads(prompt)
        except ValueError as error:
            raise RequestError(f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestError("the body is no JSON object")
    elif arguments.raw:
        body = {"prompt": prompt}
    else:
        system = [] if arguments.system is None else [("system", arguments.system)]
        talk = [*system, ("user", prompt)]
        body = {"messages": [{"role": role, "content": text} for role, text in talk]}
    return body if arguments.salt is None else {**body, "cache_salt": arguments.salt}


def ask(
    server: Namespace, path: str, method: str = "GET", body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the server at `server.url` answers, as JSON, to who has the key `server.api_key`.

    Raises   RequestError: it refuses, or there is no such server; EngineError: it fails.
    """
    content = None if body is None else json.dumps(body).encode()
    url, key = server.url, server.api_key or _known_key()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = Request(url.rstrip("/") + path, content, headers, method=method)
        if request.type not in ("http", "https"):
            raise RequestError(f"{url} is no address of a server; give http://HOST:PORT")
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return _object(response.read(), url)
    except HTTPError as error:
        raise _refusal(error, url) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"no answer from {url}: {reason}; is a server there?") from error


def _known_key() -> str:
    """The first key that a server would be given in this environment."""
    known = [os.environ.get(f"OCTAVO_{name}", "") for name in ("ADMIN_API_KEY", "API_KEY")]
    return next(filter(None, known), "").partition(",")[0].strip()


def _object(content: bytes, url: str) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise RequestError(f"what answers at {url} is no server of Octavo")
    return answer


def _refusal(error: HTTPError, url: str) -> RequestError | EngineError:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"{url} answers with status {error.code}; is it a server of Octavo?"
    return EngineError(message) if error.code >= 500 else RequestError(message)


def _change(text: str) -> tuple[str, Any]:
    """A limit and its new value: a number, none, or a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--set {text}: expected NAME=VALUE")
    if value.lower() in ("none", "null"):
        return name.replace("-", "_"), None
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _table(limits: Mapping[str, Any], ceilings: Mapping[str, int]) -> str:
    rows: Sequence[tuple[str, str, str]] = [
        (name, _shown(value), f"at most {ceilings[name]:,}" if name in ceilings else "")
        for name, value in limits.items()
    ]
    wide, high = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "".join(
        f"{name:<{wide}}  {value:>{high}}  {most}".rstrip() + "\n" for name, value, most in rows
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)
