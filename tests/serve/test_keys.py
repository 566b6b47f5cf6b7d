"""Keys: read, found, exchanged; what a permit makes of a request."""

import hmac
from hashlib import sha256
from pathlib import Path

import pytest

from octavo.core.request import Request
from octavo.engine.params import SamplingParams
from octavo.errors import ConfigError, Forbidden
from octavo.serve.keyfile import keys_of, read_keys
from octavo.serve.keys import EVERYTHING, Keyring, Permit, offered

SECRET = "sk-a-secret"


def write(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text, encoding="utf-8")
    return file


def request(**fields: object) -> Request:
    return Request(id="a", prompt=(1,), max_tokens=1, **fields)  # type: ignore[arg-type]


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = sha256(b"sk-of-bob").hexdigest()
    file = write(
        tmp_path,
        f"""
        [[key]]
        name = "alice"
        key = "{SECRET}"

        [[key]]
        name = "bob"
        sha256 = "{digest}"
        tenant = "team"
        namespace = "shared"
        requests_per_minute = 60
        tokens_per_minute = 100_000
        max_concurrent = 4
        highest_priority = 5
        metrics = true

        [[key]]
        name = "carol"
        key = "sk-of-carol"
        tenant = "team"
        admin = true
        """,
    )
    alice, bob, carol = read_keys(file)
    assert alice.permit == Permit(
        name="alice", tenant="alice", namespace="alice", rights=frozenset(("open", "use"))
    )
    assert bob.permit == Permit(
        name="bob",
        tenant="team",
        namespace="shared",
        highest_priority=5,
        rights=frozenset(("open", "use", "metrics")),
    )
    assert (bob.quota.requests_per_minute, bob.quota.tokens_per_minute) == (60, 100_000)
    assert bob.quota.max_concurrent == 4
    assert (carol.permit.namespace, carol.permit.rights) == ("team", EVERYTHING)
    ring = Keyring([alice, bob, carol])
    for secret, name in ((SECRET, "alice"), ("sk-of-bob", "bob"), ("sk-of-carol", "carol")):
        visit = ring.find([b"wrong", secret.encode()])
        assert visit is not None
        assert visit.permit.name == name
    assert ring.find([digest.encode(), b"", b"alice", SECRET[:-1].encode()]) is None
    assert ring.find([]) is None
    assert SECRET not in repr((alice, bob, carol, ring))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing required field `key`"),
        ("key = []", r"has no \[\[key\]\]"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}", "is not TOML"),
        (f"[[key]]\nkey = '{SECRET}'", r"missing required field `name` - at `\$.key\[0\]`"),
        ("[[key]]\nname = 'a'", "key 'a': give either key or sha256"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}'\nsha256 = 'ab'", "give either key or sha256"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}'\ntenat = 'b'", "unknown field `tenat`"),
        ("[[key]]\nname = 'a'\nsha256 = 'ab'", "sha256 must be 64 hexadecimal digits"),
        ("[[key]]\nname = 'a'\nsha256 = 'zz'", "sha256 must be 64 hexadecimal digits"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET} '", "without spaces"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}\u00fc'", "without spaces"),
        ("[[key]]\nname = 'a'\nkey = ''", "without spaces"),
        (f"[[key]]\nname = ''\nkey = '{SECRET}'", "a name has 1 to 256 characters"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}'\nmax_concurrent = 0", "max_concurrent must be"),
        (f"[[key]]\nname = 'a'\nkey = '{SECRET}'\nadmin = 1", "Expected `bool`, got `int`"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(write(tmp_path, text))
    assert SECRET not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the keys file .*No such file"):
        read_keys(tmp_path / "none.toml")


def test_keys_by_themselves_are_of_one_tenant() -> None:
    first, second, admin = keys_of(["sk-1", "sk-2"], ["sk-3"], None)
    assert first.permit.tenant == second.permit.tenant == admin.permit.tenant == ""
    assert first.permit.namespace == second.permit.namespace == ""
    assert "admin" not in first.permit.rights | second.permit.rights
    assert admin.permit.rights == EVERYTHING
    with pytest.raises(ConfigError, match="api-key-1: a key is made of letters") as caught:
        keys_of(["sk secret"], [], None)
    assert "secret" not in str(caught.value)


def test_two_keys_that_cannot_be_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two API keys are the same"):
        Keyring(keys_of(["sk-1"], ["sk-1"], None))
    twice = "[[key]]\nname = 'a'\nkey = 'b'\n[[key]]\nname = 'a'\nkey = 'c'"
    with pytest.raises(ConfigError, match="two API keys have the name 'a'"):
        Keyring(read_keys(write(tmp_path, twice)))


def test_every_key_is_compared_with_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = keys_of(["sk-1", "sk-2", "sk-3"], [], None)
    for secret in (b"sk-1", b"sk-2", b"nothing"):
        compared.clear()
        Keyring(keys).find([secret])
        assert compared == [key.digest for key in keys]


def test_what_was_used_outlives_an_exchange(tmp_path: Path) -> None:
    text = "[[key]]\nname = 'a'\nkey = 'b'\nrequests_per_minute = {}\n"
    ring = Keyring(read_keys(write(tmp_path, text.format(5))))

    def meter(secret: bytes = b"b") -> object:
        visit = ring.find([secret])
        return None if visit is None else visit.meter

    before = meter()
    ring.exchange(read_keys(write(tmp_path, text.format(5).replace("'b'", "'new'"))))
    assert meter() is None
    assert meter(b"new") is before
    ring.exchange(read_keys(write(tmp_path, text.format(6))))
    assert meter() is not before


def test_a_permit_stamps_a_request() -> None:
    permit = Permit(tenant="a", namespace="n", highest_priority=2)
    stamped = permit.stamped(request(tenant="a", priority=2, salt="s"))
    assert (stamped.tenant, stamped.priority, stamped.salt) == ("a", 2, "1:ns")
    for field, fields in (("tenant", {"tenant": ""}), ("priority", {"priority": 1})):
        with pytest.raises(Forbidden) as caught:
            permit.stamped(request(**{"tenant": "a", "priority": 2} | fields))  # type: ignore[arg-type]
        assert caught.value.param == field
    assert Permit().stamped(request(tenant="x", priority=-9)) == request(tenant="x", priority=-9)


def test_no_salt_spells_another_namespace() -> None:
    names, salts = ("", "a", "1:a", "11", "a1:"), ("", "a", "1:a", "0:", "1:1")
    stamped = {
        Permit(namespace=name).stamped(request(salt=salt)).salt for name in names for salt in salts
    }
    assert len(stamped) == len(names) * len(salts)


def test_what_a_key_leaves_open() -> None:
    params = SamplingParams(tenant="x", priority=1)
    assert Permit().defaults(params) == params
    assert Permit(tenant="a").defaults(params).tenant == "a"
    assert Permit(highest_priority=5).defaults(params).priority == 5
    assert Permit(highest_priority=-5).defaults(params).priority == 1


def test_secrets_come_as_each_client_sends_them() -> None:
    assert offered([(b"authorization", b"bearer  k ")]) == [b"k"]
    assert offered([(b"authorization", b"Basic k"), (b"cookie", b"k"), (b"x-api-keys", b"k")]) == []
