"""Encoding equals llama.cpp's for the demo model; what is not known is refused by name."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.text.vocabulary import SPECIAL, metadata_of
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import InvalidRequest, ModelFileError
from octavo.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[1] / "data" / "tokens-smollm2.json"


def test_demo_tokenisation_equals_the_fixture(demo_tokenizer: Tokenizer) -> None:
    texts = json.loads(FIXTURE.read_text(encoding="utf-8"))
    assert len(texts) > 200
    for entry in texts:
        text = entry["text"]
        plain = demo_tokenizer.encode(text, parse_special=False, add_special=True)
        assert plain == entry["ids"], text
        parsed = demo_tokenizer.encode(text, parse_special=True, add_special=True)
        assert parsed == entry["ids_parse_special"], text
        assert demo_tokenizer.decode(plain) == text


def test_demo_special_tokens(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.bos_id == 1
    assert demo_tokenizer.eos_ids == {0, 2}
    assert demo_tokenizer.special["eos_token"] == "<|im_end|>"
    assert demo_tokenizer.chat_template is not None
    assert demo_tokenizer.decode([2, 57], skip_special=True) == "I"
    assert demo_tokenizer.decode([2, 57]) == "<|im_end|>I"


def test_decode_equals_the_library(demo_tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    reference = demo_tokenizer._parsing
    for _ in range(300):
        ids = [draw.randrange(demo_tokenizer.vocab_size) for _ in range(draw.randrange(1, 30))]
        for skip in (False, True):
            assert demo_tokenizer.decode(ids, skip_special=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


def test_both_ways_of_reading_in_many_threads(seed: int) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    text = f"{SPECIAL[0]} number {seed} {SPECIAL[1]}" * 20
    wanted = {
        parse: tokenizer.encode(text, parse_special=parse, add_special=False)
        for parse in (False, True)
    }
    assert wanted[True].count(0) == 20
    assert 0 not in wanted[False]
    with ThreadPoolExecutor(4) as threads:
        ways = [n % 2 == 0 for n in range(200)]
        found = threads.map(
            lambda parse: tokenizer.encode(text, parse_special=parse, add_special=False), ways
        )
        assert list(found) == [wanted[parse] for parse in ways]


def test_the_first_token_is_added_when_the_file_asks() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([], add_bos_token=True))
    for parse in (False, True):
        assert tokenizer.encode("a", parse_special=parse, add_special=True)[0] == 1
        assert tokenizer.encode("a", parse_special=parse, add_special=False)[0] != 1


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["ab", "12345", "!"]),
        ("smollm", ["ab", "1", "2", "3", "4", "5", "!"]),
        ("llama-bpe", ["ab", "123", "45", "!"]),
        ("qwen2", ["ab", "1", "2", "3", "4", "5", "!"]),
    ],
)
def test_pre_tokenizers_cut_digits_their_own_way(pre: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([], pre=pre))
    cut = tokenizer._parsing.pre_tokenizer.pre_tokenize_str("ab12345!")
    assert [word for word, _ in cut] == words


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model", "llama", "'llama'"),
        ("pre", "no-such-cut", "'no-such-cut'"),
        ("tokens", None, "tokenizer.ggml.tokens"),
        ("merges", None, "tokenizer.ggml.merges"),
        ("token_type", [1], "token_type has 1"),
        ("merges", ["ab"], "'ab'"),
        ("merges", ["a nowhere"], "nowhere"),
        ("eos_token_id", 10**6, "1000000"),
    ],
)
def test_foreign_metadata_is_refused_by_name(key: str, value: Any, named: str) -> None:
    metadata = metadata_of([])
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    else:
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=named):
        Tokenizer.from_gguf(metadata)


def test_ids_outside_the_vocabulary_stand_for_nothing() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_a_lone_surrogate_is_the_callers_fault() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer.encode("a\ud800", parse_special=False, add_special=False)


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **files: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_folder_equals_the_metadata_it_was_made_from(tmp_path: Path) -> None:
    from_file = Tokenizer.from_gguf(metadata_of([b"he", b"hel"], merges=["h e", "he l"]))
    from_file._parsing.enable_truncation(5)
    from_file._parsing.enable_padding(length=50)
    write_folder(
        tmp_path,
        from_file._parsing,
        tokenizer_config={
            "bos_token": {"content": SPECIAL[1]},
            "eos_token": SPECIAL[0],
            "chat_template": "of the config",
        },
        generation_config={"eos_token_id": [0, 2]},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    from_file._parsing.no_truncation()
    from_file._parsing.no_padding()
    text = f"hello {SPECIAL[0]} help 123 é"
    for parse in (False, True):
        ids = tokenizer.encode(text, parse_special=parse, add_special=True)
        assert ids == from_file.encode(text, parse_special=parse, add_special=True)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {0, 2})
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == from_file.vocab_size
    assert tokenizer.chat_template == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of its own file", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "of its own file"


def test_a_folder_with_byte_fallback(tmp_path: Path) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    parsing = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parsing.pre_tokenizer = pre_tokenizers.Metaspace()
    parsing.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    write_folder(tmp_path, parsing)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([256, 257, 0xC3, 0xA9, 258]) == " abé "


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    parsing = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    parsing.decoder = decoders.WordPiece()
    write_folder(tmp_path, parsing)
    with pytest.raises(ModelFileError, match="WordPiece"):
        Tokenizer.from_folder(tmp_path)
    parsing.decoder = decoders.ByteLevel()
    write_folder(tmp_path, parsing)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match="not JSON"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "pre",
        "tokens",
        "token_type",
        "merges",
        "bos_token_id",
        "eos_token_id",
        "eot_token_id",
        "add_bos_token",
    ],
)
def test_metadata_of_the_wrong_type_is_refused_by_name(key: str) -> None:
    wrong: tuple[Any, ...] = (None, -1, 2**40, 1.5, float("nan"), "x", [], [None], [[]], ["é"])
    for value in wrong:
        if (key, value) == ("merges", []):
            continue
        metadata = metadata_of([]) | {f"tokenizer.ggml.{key}": value}
        with pytest.raises(ModelFileError, match="tokenizer") as caught:
            Tokenizer.from_gguf(metadata)
        assert len(str(caught.value)) < 300
    long = ["x" * 50_000]
    for value in (long, long * 300, "x" * 50_000):
        with pytest.raises(ModelFileError) as caught:
            Tokenizer.from_gguf(metadata_of([]) | {f"tokenizer.ggml.{key}": value})
    with pytest.raises(ModelFileError, match="token_type has 0 entries"):
        Tokenizer.from_gguf(metadata_of([], tokens=[], token_type=[]))


def test_a_vocabulary_without_an_end_token() -> None:
    metadata = metadata_of([])
    del metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert "eos_token" not in tokenizer.special
    assert tokenizer.eos_ids == {0}  # <|end|> ends an answer wherever it is a control token


def test_no_token_takes_up_more_of_a_text_than_the_longest_piece(
    demo_tokenizer: Tokenizer,
) -> None:
    longest = demo_tokenizer.longest_piece_bytes
    assert longest is not None
    for token in range(demo_tokenizer.vocab_size):
        assert len(demo_tokenizer.token_bytes(token)) <= longest


def test_a_long_text_does_not_hold_up_other_threads(demo_tokenizer: Tokenizer) -> None:
    """The encoder is native code: it must let go of the interpreter while it works."""
    text = "word " * 300_000
    times = [time.perf_counter()]
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(
            demo_tokenizer.encode, text, parse_special=True, add_special=False
        )
        while not encoding.done():
            times.append(time.perf_counter())
    assert len(encoding.result()) == 300_001
    longest = max(after - before for before, after in pairwise(times))
    assert longest < (times[-1] - times[0]) / 2


def test_pieces_that_only_look_like_bytes(tmp_path: Path) -> None:
    vocabulary = {"<0xZZ>": 0, "<0x-1>": 1, "<0x+1>": 2, "<0x0a>": 3, "<0x 1>": 4}
    parsing = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    parsing.decoder = decoders.Sequence([decoders.ByteFallback()])
    write_folder(tmp_path, parsing)
    assert Tokenizer.from_folder(tmp_path).decode(range(5)) == "<0xZZ><0x-1><0x+1>\n<0x 1>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"5"),
        ("config.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b"[" * 100_000),
    ],
)
def test_a_broken_file_of_a_folder_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_folder(tmp_path, Tokenizer.from_gguf(metadata_of([]))._parsing)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("odd", [None, 5, 1.5, "x", [], {}, [{}], [{"name": "x"}], [[0]], [True]])
def test_entries_of_odd_types_count_as_absent(tmp_path: Path, odd: object) -> None:
    write_folder(
        tmp_path,
        Tokenizer.from_gguf(metadata_of([]))._parsing,
        tokenizer_config={"bos_token": odd if odd != "x" else 1, "chat_template": odd},
        generation_config={"eos_token_id": odd},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids <= {5}
    assert tokenizer.chat_template == ("x" if odd == "x" else None)
