"""octavo generate and octavo chat: answers of a model in this process, on the terminal."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import engine_config, sampling_settings
from octavo.config import RULES
from octavo.errors import EngineError, InvalidRequest, RequestError, SetupError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.params import SamplingParams
    from octavo.text.assembler import Delta, Ended

HELP = "Ctrl-C cancels an answer, Ctrl-D ends, /reset forgets the conversation"

Message = dict[str, str]


def generate(arguments: argparse.Namespace) -> int:
    """Stream the answer to one prompt to stdout."""
    prompt = _checked_prompt(arguments.prompt)
    _check_params(arguments)
    llm = _load(arguments)
    params = _params(arguments, llm)
    if arguments.raw or not llm.has_chat_template:
        answer = llm.stream(prompt, params)
    else:
        messages = [*_system(arguments.system), {"role": "user", "content": prompt}]
        answer = llm.chat_stream(messages, params)
    for text in _texts(answer):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return 0


def chat(arguments: argparse.Namespace) -> int:
    """Read messages and stream answers until the input ends; the history is kept."""
    _check_params(arguments)
    llm = _load(arguments)
    params = _params(arguments, llm)
    if not llm.has_chat_template:
        raise SetupError(
            "this model has no chat template; use octavo generate --raw, or another --model"
        )
    interactive = sys.stdin.isatty()
    if interactive:
        _note(HELP)
    history = _system(arguments.system)
    for line in _lines("> " if interactive else ""):
        if line == "/reset":
            history = _system(arguments.system)
            _note("the conversation is forgotten")
        elif line.startswith("/"):
            _note(f"unknown command {line.split()[0]}; {HELP}")
        elif line:
            history = _turn(llm, history, line, params)
    return 0


def _turn(llm: "LLM", history: list[Message], line: str, params: "SamplingParams") -> list[Message]:
    """One question and its answer, printed as it comes; returns the history that follows.

    A cancelled answer stays as far as it went. A refused question leaves no trace.
    """
    asked = [*history, {"role": "user", "content": line}]
    said: list[str] = []
    try:
        for text in _texts(llm.chat_stream(asked, params)):
            said.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except RequestError as error:
        _note(f"octavo: error: {error}; /reset starts anew")
        return history
    sys.stdout.write("\n")
    sys.stdout.flush()
    return [*asked, {"role": "assistant", "content": "".join(said)}] if said else history


def _texts(answer: "Iterable[Delta | Ended]") -> Iterator[str]:
    """The pieces of text of an answer.

    Raises   EngineError: the answer ended because Octavo failed.
    """
    from octavo.text.assembler import Delta

    for item in answer:
        if isinstance(item, Delta):
            yield item.text
        elif item.finish_reason == "error":
            raise EngineError(item.message or "the answer could not be completed")


def _lines(prompt: str) -> Iterator[str]:
    """What the user types, until the end of input. Ctrl-C at the prompt starts a new line."""
    if prompt:
        # Importing it gives `input` a history and line editing.
        import readline  # noqa: F401
    while True:
        try:
            yield input(prompt).strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            if prompt:
                print(file=sys.stderr)
            return


def _load(arguments: argparse.Namespace) -> "LLM":
    config, _ = engine_config(arguments)
    settings: dict[str, Any] = {name: getattr(config, name) for name in RULES}
    from octavo.engine.llm import LLM

    return LLM(**settings)


def _check_params(arguments: argparse.Namespace) -> None:
    """What cannot be asked costs no waiting."""
    from octavo.engine.params import SamplingParams

    SamplingParams(**sampling_settings(arguments))


def _params(arguments: argparse.Namespace, llm: "LLM") -> "SamplingParams":
    """What was asked, over what the model wants."""
    return replace(llm.default_params, **sampling_settings(arguments))


def _checked_prompt(prompt: str) -> str:
    """The prompt as text; `-` stands for all of stdin."""
    try:
        text = sys.stdin.buffer.read().decode() if prompt == "-" else prompt
        # Bytes of the command line that are no UTF-8 come as lone surrogates.
        text.encode()
    except UnicodeError as error:
        raise InvalidRequest("the prompt is not valid UTF-8 text", param="prompt") from error
    if not text:
        raise InvalidRequest("the prompt is empty; give some text", param="prompt")
    return text


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": text}]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
