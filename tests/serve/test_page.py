"""The page at /: what is served, under which policy, and that it travels with the package."""

import re
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest
from tests.serve.scripted import scripted_server

from octavo.serve.page import FOLDER

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(file.name for file in FOLDER.iterdir())
EXPORT = r"^export (?:async )?(?:function\*?|class|const) (\w+)"
MODULES = [name for name in FILES if name.endswith(".js")]


def test_the_page_is_there(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Octavo</title>" in answer.text


@pytest.mark.parametrize("path", ["/", "/web/about.json", *(f"/web/{name}" for name in FILES)])
def test_every_file_has_a_strict_policy(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_what_has_not_changed_is_not_sent_again(http: httpx.Client) -> None:
    tag = http.get("/web/style.css").headers["etag"]
    again = http.get("/web/style.css", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/web/main.js", headers={"if-none-match": tag}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/web/none.js",
        "/web/",
        "/web/../page.py",
        "/web/..%2fpage.py",
        "/web/%2e%2e%2f%2e%2e%2fconfig.py",
        "/web/page.py",
        "/web/.js",
        "/web/%00.js",
        "/web/" + "x" * 300 + ".js",
    ],
)
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_what_the_page_wants_to_know(http: httpx.Client) -> None:
    assert http.get("/web/about.json").json() == {
        "model": "scripted",
        "version": "1.2.3",
        "chat": True,
        "max_model_len": 512,
        "architecture": "llama",
        "parameters": 134515008,
        "weights_bytes": 270000000,
    }


def test_without_web_there_is_no_page() -> None:
    with scripted_server(web=False) as served, httpx.Client(base_url=served.url) as http:
        for path in ("/", "/web/main.js", "/web/about.json"):
            assert http.get(path).status_code == 404
        assert http.get("/debug/pool").status_code == 200, "scripts may still look"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_place(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    places = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}[^\s\"')]*", text))
    assert places <= {"http://www.w3.org/2000/svg"}, "a namespace is a name, not a place"


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_imports_is_there(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
        assert module in MODULES
        other = (FOLDER / module).read_text(encoding="utf-8")
        exported = set(
            re.findall(r"^export (?:async )?(?:function\*?|class|const) (\w+)", other, re.M)
        )
        wanted = {one.strip() for one in names.split(",")}
        assert wanted <= exported, f"{name} wants {wanted - exported} of {module}"


@pytest.mark.parametrize("name", MODULES)
def test_no_text_becomes_markup(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_ids_that_modules_ask_for_are_in_the_page() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    for name in MODULES:
        asked = set(re.findall(r'\bat\("([^"]+)"\)', (FOLDER / name).read_text(encoding="utf-8")))
        assert asked <= ids, f"{name} asks for {asked - ids}"


def test_the_page_travels_with_the_package() -> None:
    """A wheel holds all of the package, a source distribution all that git does not ignore."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = settings["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == ["src/octavo"]
    assert "exclude" not in build["wheel"]
    excluded = build["sdist"]["exclude"]
    for name in ("index.html", "style.css", "main.js", "octavo.svg"):
        assert name in FILES
        parts = (*(FOLDER / name).relative_to(ROOT).parts,)
        assert not any(Path(part).match(pattern) for part in parts for pattern in excluded)
    if (ROOT / ".git").exists():
        paths = [str((FOLDER / name).relative_to(ROOT)) for name in FILES]
        ignored = subprocess.run(
            ["git", "check-ignore", "--no-index", *paths], cwd=ROOT, capture_output=True, text=True
        )
        assert ignored.stdout == ""
