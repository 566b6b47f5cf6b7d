"""The files of a batch: what the lines of one ask, and the answers in another.

The output is added to a line at a time, each with one write, so that what was written before a kill
stays: a later run leaves out what is answered there, and cuts off a line that was torn.
"""

import fcntl
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.errors import ConfigError, InvalidRequest, RequestError
from octavo.serve.requests import explained
from octavo.units import MIB

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The endpoints that a line may ask."""

MAX_ID_CHARACTERS = 512
ID_PREFIX = "batch_req_"
_TORN = b'{"id":"batch_req_'
"""How every line of an output begins, also one that was torn."""
DUPLICATE = "duplicate_custom_id"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the input. The body is what would be posted to `url`."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint has answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str | None
    message: str


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output. `error` says in short what `response` does, if that is an error."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: BatchError | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """`content` is None when it is longer than any may be."""

    number: int
    content: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one line asks, or why it asks nothing that can be answered.

    `id` tells lines of one input apart, and stays the same from run to run.
    """

    id: str
    custom_id: str | None
    asked: BatchRequest | RequestError


class _Named(msgspec.Struct, frozen=True):
    custom_id: str | None = None


class _Code(msgspec.Struct, frozen=True):
    code: str | None = None


class _Done(msgspec.Struct, frozen=True):
    """What of a line of the output tells that it needs no other."""

    id: str
    custom_id: str | None
    error: _Code | None = None


def read_lines(path: Path, longest_bytes: int) -> Iterator[Line]:
    """The lines of a file that are not blank, one in memory at a time.

    Raises   ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while content := file.readline(longest_bytes):
                number += 1
                if len(content) == longest_bytes and not content.endswith(b"\n"):
                    _skip_line(file)
                    yield Line(number, None)
                elif content.strip():
                    yield Line(number, content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(MIB)) and not rest.endswith(b"\n"):
        pass


def count_lines(path: Path) -> int | None:
    """How many lines a file has; None if it can be read only once.

    Raises   ConfigError: the file cannot be read.
    """
    try:
        if not (path.is_file() or path.is_dir() or not path.exists()):
            return None
        found, last = 0, b"\n"
        with path.open("rb") as file:
            while chunk := file.read(MIB):
                found, last = found + chunk.count(b"\n"), chunk[-1:]
        return found + (last != b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def parse_line(content: bytes | None) -> BatchRequest:
    """Raises  InvalidRequest: it is no request of a batch."""
    if content is None:
        raise InvalidRequest("the line is longer than --max-body-size allows")
    try:
        request = msgspec.json.decode(content, type=BatchRequest)
    except msgspec.ValidationError as error:
        raise explained(str(error), BatchRequest.__struct_fields__) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from error
    if not 0 < len(request.custom_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequest(
            f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters", param="custom_id"
        )
    if request.method != "POST":
        raise InvalidRequest(f"method must be POST, not {request.method!r}", param="method")
    if request.url not in PATHS:
        raise InvalidRequest(
            f"url is {request.url!r}; a batch takes {', '.join(PATHS)}", param="url"
        )
    return request


def _custom_id(content: bytes | None) -> str | None:
    """That of a line which is no request, if it can be told."""
    try:
        return msgspec.json.decode(content or b"", type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class Output:
    """The answers there are, and those that are added. One run writes to a file at a time.

    Raises   ConfigError: the file cannot be used, another run uses it, or it holds anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: set[str] = set()
        """The custom ids whose requests need no other answer."""
        self.refused: set[str] = set()
        """The ids of lines that were told to be none, or to have another's custom id."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except OSError as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"another batch writes to {path}; give another file") from error
            raise self._unusable(error) from error
        except ConfigError:
            os.close(self._file)
            raise

    def write(self, answer: BatchAnswer) -> None:
        """Raises  ConfigError: there is no room for it, say; what was written before stays."""
        rest = memoryview(msgspec.json.encode(answer) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> None:
        """Learn what is answered; the line that was torn, if there is one, is cut off."""
        end = number = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, content in enumerate(file, 1):
                if not content.endswith(b"\n"):
                    if content[: len(_TORN)] != _TORN[: len(content)]:
                        raise self._foreign(number)
                    break
                self._learn(content, number)
                end += len(content)
        if end < os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)

    def _learn(self, content: bytes, number: int) -> None:
        try:
            done = msgspec.json.decode(content, type=_Done)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._foreign(number) from error
        if not done.id.startswith(ID_PREFIX):
            raise self._foreign(number)
        duplicate = done.error is not None and done.error.code == DUPLICATE
        if done.custom_id is None or duplicate:
            self.refused.add(done.id)
        else:
            self.answered.add(done.custom_id)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path} holds something else than answers of a batch, in line {number}; give"
            " another file"
        )

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write to {self.path}: {error.strerror}")


class Intake:
    """The lines of an input as jobs, but for those that have an answer: their custom id is among
    the `answered`, or their own id among the `refused`.

    Keeps    the custom id of each line in memory, and nothing else.
    """

    def __init__(self, lines: Iterable[Line], answered: set[str], refused: set[str]) -> None:
        self.skipped = 0
        self._lines = lines
        self._answered = answered
        self._refused = refused
        self._seen: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        for line in self._lines:
            job = self._job(line)
            if job is None:
                self.skipped += 1
            else:
                yield job

    def _job(self, line: Line) -> Job | None:
        """None if there is an answer already."""
        name = f"{ID_PREFIX}{line.number}_{zlib.crc32(line.content or b''):08x}"
        custom_id = _custom_id(line.content)
        if custom_id is None or custom_id in self._seen:
            asked = _duplicate(custom_id) if custom_id in self._seen else _asked(line.content)
            done = name in self._refused
        else:
            self._seen.add(custom_id)
            asked = _asked(line.content)
            done = custom_id in self._answered
            self._answered.discard(custom_id)
        return None if done else Job(id=name, custom_id=custom_id, asked=asked)


def _asked(content: bytes | None) -> BatchRequest | RequestError:
    try:
        return parse_line(content)
    except RequestError as error:
        return error


def _duplicate(custom_id: str | None) -> RequestError:
    error = InvalidRequest(
        f"custom_id {custom_id!r} stands in an earlier line too; give each line its own",
        param="custom_id",
    )
    error.code = DUPLICATE
    return error
