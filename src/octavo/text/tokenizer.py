"""Text to token ids and back, from GGUF metadata or from a `tokenizer.json` folder."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from octavo.errors import InvalidRequest, ModelFileError

PieceCoding = Literal["byte_level", "sentencepiece"]
"""How a vocabulary spells bytes: one printable character each, or `▁` for a space and `<0x0A>`."""

_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_GGUF_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}

_END_PIECES = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
    }
)
"""Control tokens that end an answer in every model that has them; a GGUF names only one or two."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Encodes, decodes, and knows the model's special tokens.

    `bos_id` may be absent; any of `eos_ids` ends an answer. `special` maps the name of a role
    (`bos_token`, `eos_token` …) to its text, as chat templates ask for it. No token takes up more
    of a text than `longest_piece_bytes`; None where that cannot be said.
    Keeps  encoding may run in several threads at once: nothing is switched between calls.
    """

    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    special: Mapping[str, str]
    chat_template: str | None
    vocab_size: int
    longest_piece_bytes: int | None
    _coding: PieceCoding
    _parsing: tokenizers.Tokenizer
    """Reads special tokens out of the text."""
    _literal: tokenizers.Tokenizer
    """Takes the text of a special token for plain text; shares the model with `_parsing`."""
    _bytes: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer inside a GGUF file, from the file's metadata.

        Raises  ModelFileError: a key is missing, or the kind of tokenizer is not known here.
        """
        return _from_gguf(metadata)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face model folder (`tokenizer.json` and its neighbours).

        Raises  ModelFileError: a file is missing or broken, or its decoder is not known here.
        """
        return _from_folder(folder)

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        """The token ids of `text`.

        `parse_special` reads special tokens where the text spells them; a rendered chat template
        needs it. Without it `<|im_end|>` is seven plain characters and a few tokens.
        `add_special` adds what the model wants around a prompt, usually one token at the start.

        Raises  InvalidRequest: the text is not valid Unicode (a lone surrogate).
        """
        encoder = self._parsing if parse_special else self._literal
        try:
            # Unlike `encode`, the batch call lets other threads run meanwhile.
            (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=add_special)
            return list(encoding.ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "the text is not valid Unicode: it has a lone surrogate"
            ) from error

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; none for an id that pads the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._parsing.id_to_token(token) if token >= 0 else None
            known = self._bytes[token] = b"" if piece is None else self._piece_bytes(token, piece)
        return known

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of the first `count` ids, as `token_bytes` gives them.

        Cost     a tenth of asking for each.
        """
        found = [b""] * count
        for piece, token in self._parsing.get_vocab(with_added_tokens=True).items():
            if token < count:
                found[token] = self._piece_bytes(token, piece)
        return found

    def _piece_bytes(self, token: int, piece: str) -> bytes:
        if token in self.special_ids:
            return piece.encode()
        if self._coding == "byte_level":
            return _byte_level_bytes(piece)
        return _sentencepiece_bytes(piece)


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, are U+0100 and on.
    Source  GPT-2's byte-level BPE (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF = _byte_alphabet()


_FOREIGN = 0x100
_LATIN = {
    **dict.fromkeys(range(0x100), _FOREIGN),
    **{ord(character): byte for character, byte in _BYTE_OF.items()},
}
"""Turns each character into that of Latin-1 which has its byte; what is no byte's into one that
Latin-1 has not."""


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:  # a token added as plain text, outside the alphabet
        return piece.encode()


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece_bytes(piece: str) -> bytes:
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(found[1])
    return piece.replace("▁", " ").encode()


# ---- from GGUF --------------------------------------------------------------------------------


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = _typed(metadata, "tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}; Octavo reads 'gpt2' (byte-level BPE) from GGUF"
        )
    pre_name = _typed(metadata, "tokenizer.ggml.pre", str, "gpt-2")
    pieces = _list_of(metadata, "tokenizer.ggml.tokens", str)
    types = _list_of(metadata, "tokenizer.ggml.token_type", int)
    merges = _list_of(metadata, "tokenizer.ggml.merges", str)
    if len(types) != len(pieces) or not pieces:
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(pieces)} tokens"
        )
    pre_tokenizer = _gguf_pre_tokenizer(pre_name)
    try:
        model = models.BPE(
            {piece: token for token, piece in enumerate(pieces)},
            [_merge_pair(merge) for merge in merges],
            ignore_merges=pre_name == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"the GGUF tokenizer does not hold together: {error}") from error
    added = [
        AddedToken(pieces[token], special=kind == _GGUF_CONTROL, normalized=False)
        for token, kind in enumerate(types)
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)
    ]
    parsing = tokenizers.Tokenizer(model)
    parsing.pre_tokenizer = pre_tokenizer
    parsing.decoder = decoders.ByteLevel()
    _add_tokens(parsing, added)

    named = {
        role: _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(pieces))
        for role, key in _GGUF_ROLES.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    bos = named.get("bos_token")
    adds_bos = _typed(metadata, "tokenizer.ggml.add_bos_token", bool, pre_name == "llama-bpe")
    if bos is not None and adds_bos:
        _put_first(parsing, pieces[bos], bos)
    special_ids = frozenset(t for t, kind in enumerate(types) if kind == _GGUF_CONTROL)
    more_ends = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return Tokenizer(
        bos_id=bos,
        eos_ids=frozenset(
            [token for role, token in named.items() if role == "eos_token"]
            + [_token_id(metadata, key, len(pieces)) for key in more_ends if key in metadata]
            + [token for token in special_ids if pieces[token] in _END_PIECES]
        ),
        special_ids=special_ids,
        special={role: pieces[token] for role, token in named.items()},
        chat_template=_typed(metadata, "tokenizer.chat_template", str, None),
        vocab_size=len(pieces),
        longest_piece_bytes=max(map(len, map(str.encode, pieces))),
        _coding="byte_level",
        _parsing=parsing,
        _literal=_literal_twin(parsing),
    )


def _typed(metadata: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """The value of `key`. Without a default it must be there."""
    if key not in metadata:
        if default:
            return default[0]
        raise ModelFileError(f"the GGUF file has no {key}: it holds no tokenizer")
    value = metadata[key]
    if type(value) is not kind:
        raise ModelFileError(f"{key} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value


def _list_of(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    values = _typed(metadata, key, list)
    if set(map(type, values)) - {kind}:
        odd = next(n for n, value in enumerate(values) if type(value) is not kind)
        raise ModelFileError(
            f"{key} holds {reprlib.repr(values[odd])} at {odd}, expected {kind.__name__}"
        )
    return values


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int:
    token: int = _typed(metadata, key, int)
    if not 0 <= token < count:
        raise ModelFileError(f"{key} is {token}, outside the {count} tokens of the file")
    return token


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left and right):
        raise ValueError(f"the merge {merge!r} is not two pieces with a space between")
    return left, right


def _gguf_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging; the name is `tokenizer.ggml.pre`."""
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    as_is = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "gpt-2":
            return by_regex
        case "smollm":
            return pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), by_regex]
            )
        case "llama-bpe" | "qwen2":
            pattern = Regex(_LLAMA3_SPLIT if name == "llama-bpe" else _QWEN2_SPLIT)
            return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), as_is])
    raise ModelFileError(
        f"tokenizer.ggml.pre is {name!r}; Octavo knows gpt-2, smollm, llama-bpe and qwen2"
    )


# ---- from a folder ----------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{folder} has no tokenizer.json")
    try:
        parsing = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is not a tokenizer: {error}") from error
    # Some files come with the limits they were trained under.
    parsing.no_truncation()
    parsing.no_padding()
    if not parsing.get_vocab_size():
        raise ModelFileError(f"{path} has an empty vocabulary")
    config = _json_object(folder / "tokenizer_config.json")
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = _json_object(folder / "special_tokens_map.json") | config
    texts = {role: text for role in roles if (text := _token_text(special.get(role)))}
    added = parsing.get_added_tokens_decoder()
    return Tokenizer(
        bos_id=parsing.token_to_id(texts["bos_token"]) if "bos_token" in texts else None,
        eos_ids=_folder_eos_ids(folder, parsing, texts.get("eos_token")),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        special=texts,
        chat_template=_folder_chat_template(folder, config),
        vocab_size=max(parsing.get_vocab(with_added_tokens=True).values()) + 1,
        # A normalizer may shorten the text, an unknown token or a stripped space stand for much.
        longest_piece_bytes=None,
        _coding=_coding_of(path),
        _parsing=parsing,
        _literal=_literal_twin(parsing),
    )


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8: {error}") from error


def _token_text(entry: object) -> str | None:
    """A special token is written as its text, or as an object that holds it as `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _folder_eos_ids(
    folder: Path, parsing: tokenizers.Tokenizer, eos_token: str | None
) -> frozenset[int]:
    ids = [] if eos_token is None else [parsing.token_to_id(eos_token)]
    for name in ("generation_config.json", "config.json"):
        entry = _json_object(folder / name).get("eos_token_id")
        ids += entry if isinstance(entry, list) else [entry]
    return frozenset(token for token in ids if type(token) is int and token >= 0)


def _folder_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _text_of(path)
    entry = config.get("chat_template")
    if isinstance(entry, list):  # several named templates
        named = (item for item in entry if isinstance(item, dict))
        entry = next(
            (item.get("template") for item in named if item.get("name") == "default"), None
        )
    return entry if isinstance(entry, str) else None


def _coding_of(path: Path) -> PieceCoding:
    """Which bytes a piece stands for, from the kinds of decoder in `tokenizer.json`."""
    decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder") or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return "sentencepiece"
    raise ModelFileError(f"{path} has an unknown decoder: {', '.join(sorted(kinds)) or 'none'}")


# ---- both -------------------------------------------------------------------------------------


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    tokenizer.add_tokens([token for token in tokens if not token.special])


def _put_first(tokenizer: tokenizers.Tokenizer, piece: str, token: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{piece} $A", special_tokens=[(piece, token)]
    )


def _literal_twin(parsing: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, but blind to special tokens in the text; the vocabulary is shared.

    The library has one switch for this on the whole object, which two threads would fight over.
    """
    literal = tokenizers.Tokenizer(parsing.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(parsing, part)) is not None:
            setattr(literal, part, value)
    for _, token in sorted(parsing.get_added_tokens_decoder().items()):
        _add_tokens(literal, [token])
    literal.encode_special_tokens = True
    return literal
