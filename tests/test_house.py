"""The rules of the house: who may import whom, what importing costs, how a file is laid out."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "octavo"
FILES = sorted(SOURCE.rglob("*.py"))

# Lower rows first. A part imports from its own row's parts only within itself, and from any row
# above it in this table.
ROWS = (
    ("errors", "units"),
    ("config",),
    ("core",),
    ("ops", "text", "resolve"),
    ("models", "tiers", "observe", "simulate"),
    ("runtime",),
    ("engine",),
    ("disagg", "cluster"),
    ("bench", "serve"),
    ("cli",),
)
ROW = {part: index for index, row in enumerate(ROWS) for part in row}

# What is narrower than the rows say.
ONLY = {
    "core": {"octavo.errors", "octavo.units", "octavo.core"},
    "simulate": {"octavo.errors", "octavo.units", "octavo.core", "octavo.simulate"},
}
CORE_VALUES = {f"octavo.core.{name}" for name in ("budget", "calls", "events", "plan", "request")}
SEES_CORE_VALUES_ONLY = ("runtime", "tiers", "observe", "models", "ops", "text")

NEVER = {"torch", "transformers"}
LAZY = {
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "opentelemetry",
    "prometheus_client",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}


def module_name(file: Path) -> str:
    parts = ("octavo", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The part of the house a module lives in; `octavo` itself for the root."""
    return module.split(".")[1] if "." in module else module


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports, wherever in the file it does so. `from a import b` gives
    `a.b` when that is a module of ours, else `a`."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                yield node.lineno, (f"{base}.{alias.name}" if is_ours(base, alias.name) else base)


def is_ours(base: str, name: str) -> bool:
    if base.split(".")[0] != "octavo":
        return False
    place = SOURCE.joinpath(*base.split(".")[1:], name)
    return place.is_dir() or place.with_suffix(".py").is_file()


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


def fault_of(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`; None when it may."""
    top = imported.split(".")[0]
    part = part_of(importer)
    if top in NEVER:
        return f"{top} is a test dependency only"
    if top != "octavo":
        if part == "core" and top not in sys.stdlib_module_names:
            return "core is standard library only"
        return None
    if part == "octavo" or imported in ("octavo", "octavo._native"):
        return None
    if part in ONLY and not within(imported, ONLY[part]):
        return f"{part} may import {', '.join(sorted(ONLY[part]))} only"
    if part in SEES_CORE_VALUES_ONLY and part_of(imported) == "core" and imported != "octavo.core":
        return None if within(imported, CORE_VALUES) else f"{part} sees the values of core only"
    target = part_of(imported)
    if target not in ROW or part not in ROW:
        return "this part has no row in the table"
    if target != part and ROW[target] >= ROW[part]:
        return f"{target} is not below {part}"
    return None


def test_imports_follow_the_rows() -> None:
    faults = [
        f"{file.relative_to(SOURCE)}:{line} imports {imported}: {fault}"
        for file in FILES
        for line, imported in imports_of(file)
        if (fault := fault_of(module_name(file), imported))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("octavo.core.pool", "numpy", False),
        ("octavo.core.pool", "heapq", True),
        ("octavo.core.pool", "octavo.config", False),
        ("octavo.runtime.runner", "octavo.core.scheduler", False),
        ("octavo.runtime.runner", "octavo.core.plan", True),
        ("octavo.engine.engine", "octavo.core.scheduler", True),
        ("octavo.engine.engine", "octavo.serve.app", False),
        ("octavo.ops.native", "octavo.models.spec", False),
        ("octavo.models.spec", "torch", False),
        ("octavo.text.chat", "octavo.ops.api", False),
        ("octavo.cli.main", "octavo.engine.llm", True),
    ],
)
def test_the_rule_itself_can_fail(importer: str, imported: str, allowed: bool) -> None:
    assert (fault_of(importer, imported) is None) == allowed


def loaded_after(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize("statement", ["import octavo", "import octavo.cli.main"])
def test_importing_octavo_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_after(statement) & LAZY


def test_only_the_cli_changes_module_state() -> None:
    faults = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in FILES
        if part_of(module_name(file)) != "cli"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Global)
    ]
    assert not faults, f"global statements below cli: {faults}"


def decorator_is_frozen_dataclass(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dataclass"
        and any(
            word.arg == "frozen" and isinstance(word.value, ast.Constant) and word.value.value
            for word in node.keywords
        )
    )


@pytest.mark.parametrize("name", ["calls", "plan", "events", "request"])
def test_values_of_the_core_are_frozen(name: str) -> None:
    classes = [
        node
        for node in tree_of(SOURCE / "core" / f"{name}.py").body
        if isinstance(node, ast.ClassDef)
        and not any(
            isinstance(base, ast.Name) and base.id in ("Protocol", "NamedTuple")
            for base in node.bases
        )
    ]
    assert classes
    thawed = [
        node.name
        for node in classes
        if not any(decorator_is_frozen_dataclass(item) for item in node.decorator_list)
    ]
    assert not thawed


def test_every_public_module_says_what_it_is() -> None:
    silent = [
        str(file.relative_to(SOURCE))
        for file in FILES
        if file.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(file))
    ]
    assert not silent


def test_functions_of_the_core_are_short() -> None:
    long = [
        f"{file.name}:{node.lineno} {node.name}: {length} lines"
        for file in sorted((SOURCE / "core").glob("*.py"))
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > 60
    ]
    assert not long


def test_public_names_are_sorted_and_exist() -> None:
    for file in FILES:
        for node in tree_of(file).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "__all__"
            ):
                names = ast.literal_eval(node.value)
                assert names == sorted(names), f"{file.relative_to(SOURCE)}: __all__ is not sorted"
                module = importlib.import_module(module_name(file))
                missing = [name for name in names if not hasattr(module, name)]
                assert not missing, f"{file.relative_to(SOURCE)}: {missing}"
