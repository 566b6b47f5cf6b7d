"""What `deploy/` names exists: metrics, flags, settings, files. What only docker or systemd can
tell is not told here."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.observe.exposition import Samples, samples_of
from tests.observe.test_metrics import IDLE, finish

from octavo.cli.main import build_parser
from octavo.config import DEFAULTS, ENVIRONMENT_PREFIX, RULES, load_config
from octavo.observe.metrics import Facts, Metrics
from octavo.serve.main import FAREWELL_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


# --- Grafana


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "octavo.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def series() -> Samples:
    """What a server shows after a while, each label among it."""
    metrics = Metrics(Facts(model_name="m", version="1", cache={"block_size": "16"}))
    finish(metrics, tenant="a", ttft_target_s=60.0)
    metrics.refused("overloaded")
    return samples_of(metrics.render(IDLE))


def expressions(dashboard: Any) -> Iterator[tuple[str, str]]:
    """(panel, expression) of every panel and variable."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], str(variable["query"])


def test_every_metric_of_the_dashboard_exists(dashboard: Any, series: Samples) -> None:
    known = {name for name, _ in series}
    named = {
        (panel, name)
        for panel, text in expressions(dashboard)
        for name in re.findall(r"\b(?:octavo|process)_\w+", text)
    }
    assert len(named) > 30
    assert not {(panel, name) for panel, name in named if name not in known}


def test_every_label_of_the_dashboard_exists(dashboard: Any, series: Samples) -> None:
    labels = {label for _, pairs in series for label, _ in pairs} | {"job", "instance"}
    for panel, text in expressions(dashboard):
        grouped = re.findall(r"by \(([^)]*)\)", text)
        used = {label.strip() for group in grouped for label in group.split(",")}
        used |= set(re.findall(r"(\w+)=~?\"", text))
        assert used <= labels, panel


def test_values_of_labels_exist(dashboard: Any, series: Samples) -> None:
    pairs = {pair for _, labels in series for pair in labels}
    for panel, text in expressions(dashboard):
        for label, number in re.findall(r"(\w+)=\"(\w+)\"", text):
            assert (label, number) in pairs, panel


def test_panels_have_their_own_ids_and_places(dashboard: Any) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_what_the_metrics_are_for_is_on_it(dashboard: Any) -> None:
    text = json.dumps(dashboard)
    for name in (
        "octavo_kv_pool_occupancy",
        "octavo_preemptions_total",
        "octavo_kv_table_depth_blocks",
        "octavo_prefix_cache_tokens_hit_total",
        "octavo_slo_answers_total",
        "octavo_time_to_first_token_seconds_bucket",
    ):
        assert name in text


# --- Prometheus


def test_prometheus_scrapes_where_a_server_listens() -> None:
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    config, _ = load_config({})
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == [f"{config.host}:{config.port}"]


# --- systemd


@pytest.fixture(scope="module")
def unit() -> dict[str, dict[str, list[str]]]:
    """Each section's keys, with all their values: a key may come several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "octavo.service").read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, found, text = line.partition("=")
            assert found, line
            section.setdefault(key, []).append(text)
    return sections


KNOWN = {
    "Unit": "Description Documentation Wants After StartLimitIntervalSec",
    "Install": "WantedBy",
    "Service": """Type ExecStart EnvironmentFile Environment Restart RestartSec KillMode
        TimeoutStopSec OOMPolicy DynamicUser CacheDirectory UMask LimitNOFILE NoNewPrivileges
        CapabilityBoundingSet AmbientCapabilities ProtectSystem ProtectHome ProtectProc ProtectClock
        ProtectControlGroups ProtectHostname ProtectKernelLogs ProtectKernelModules
        ProtectKernelTunables PrivateDevices PrivateTmp RestrictAddressFamilies RestrictNamespaces
        RestrictRealtime RestrictSUIDSGID LockPersonality MemoryDenyWriteExecute
        SystemCallArchitectures SystemCallFilter SystemCallErrorNumber""",
}
"""Keys of systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.kill(5)."""


def test_the_unit_has_keys_that_systemd_knows(unit: dict[str, dict[str, list[str]]]) -> None:
    assert unit.keys() == KNOWN.keys()
    for section, keys in unit.items():
        assert keys.keys() <= set(KNOWN[section].split()), section


def test_the_unit_starts_again_and_drains(unit: dict[str, dict[str, list[str]]]) -> None:
    service = unit["Service"]
    assert service["KillMode"] == ["mixed"]
    assert service["Restart"] == ["always"]
    assert service["OOMPolicy"] == ["continue"]
    assert int(service["TimeoutStopSec"][0]) > DEFAULTS["drain_timeout"] + FAREWELL_S
    for key in ("NoNewPrivileges", "DynamicUser", "PrivateTmp", "ProtectHome"):
        assert service[key] == ["yes"], key


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / "systemd" / "octavo.service").read_text()
    copy = tmp_path / "octavo.service"
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_of_the_unit_parses(unit: dict[str, dict[str, list[str]]]) -> None:
    (command,) = unit["Service"]["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program.endswith("/octavo")
    parsed = vars(build_parser().parse_args(arguments))
    load_config({name: value for name, value in parsed.items() if name in RULES})


def test_variables_of_the_unit_are_ours(unit: dict[str, dict[str, list[str]]]) -> None:
    for text in unit["Service"]["Environment"]:
        check_variable(text.partition("=")[0])


def check_variable(name: str) -> None:
    if name.startswith(ENVIRONMENT_PREFIX):
        setting = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        assert setting in {*RULES, "cache"}, name


# --- Docker


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def arguments(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [text for name, text in steps if name == instruction]


def test_the_image_has_two_stages_and_no_root(steps: list[tuple[str, str]]) -> None:
    first, second = (number for number, (name, _) in enumerate(steps) if name == "FROM")
    assert steps[first][1].endswith(" AS build")
    assert not any("apt-get" in text for _, text in steps[second:])
    assert arguments(steps[second:], "USER") == ["octavo"]
    assert any("useradd" in text and " octavo" in text for text in arguments(steps[second:], "RUN"))


def test_what_is_copied_exists_and_is_all_that_the_build_names(
    steps: list[tuple[str, str]],
) -> None:
    copied = [
        source
        for text in arguments(steps, "COPY")
        if not text.startswith("--from")
        for source in text.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    project = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'^(?:readme|license-files) = \W*"(.*?)"', project, re.MULTILINE))
    assert named | {"pyproject.toml", "CMakeLists.txt", "native", "src"} <= set(copied)


def test_the_image_starts_a_server_that_is_asked_how_it_is(steps: list[tuple[str, str]]) -> None:
    (entry,) = arguments(steps, "ENTRYPOINT")
    program, *words = json.loads(entry)
    assert program == "octavo"
    build_parser().parse_args(words)
    (text,) = arguments(steps, "ENV")
    variables = dict(each.partition("=")[::2] for each in text.split())
    for name in variables:
        check_variable(name)
    settings = {name: v for name, v in variables.items() if name != "OCTAVO_CACHE"}
    config, _ = load_config({}, settings)
    assert arguments(steps, "EXPOSE") == [str(config.port)]
    (check,) = arguments(steps, "HEALTHCHECK")
    code = json.loads(check[check.index("[") :])
    compile(code[-1], "HEALTHCHECK", "exec")
    assert "/health" in code[-1]


# --- the pages


@pytest.mark.parametrize("page", sorted(DEPLOY.rglob("*.md")), ids=lambda page: str(page.parent))
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_folder_has_a_page() -> None:
    folders = [folder for folder in DEPLOY.iterdir() if folder.is_dir()]
    assert len(folders) == 4
    index = (DEPLOY / "README.md").read_text()
    for folder in folders:
        assert (folder / "README.md").exists()
        assert f"({folder.name}/README.md)" in index
