"""The examples to deploy say what the package says."""

from __future__ import annotations

import configparser
import inspect
import re
import shlex
import signal
import tomllib
from pathlib import Path

import typer
import yaml

from batchwright.cli.commands import app
from batchwright.client.agent import allowed
from batchwright.client.job_work import LAST_SECONDS
from batchwright.service.background_queue import BackgroundQueue
from batchwright.service.operating.serving import GRACE_SECONDS
from batchwright.service.webhook import ANSWER_SECONDS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CLOSE = inspect.signature(BackgroundQueue.close).parameters["seconds"].default
TO_END = GRACE_SECONDS + ANSWER_SECONDS + 2 * CLOSE  # requests, webhook, remover and adviser
WITHOUT = {"torch", "scikit-learn", "threadpoolctl", "pillow", "matplotlib"}


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def test_the_image_installs_what_the_package_names_but_for_training():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [one for one in project["dependencies"] if name_of(one) not in WITHOUT]
    wanted += project["optional-dependencies"]["serve"]
    text = (DEPLOY / "Dockerfile").read_text()
    (listed,) = re.findall(r"RUN pip install --no-cache-dir \\\n((?: +\".*\n)+)", text)
    assert sorted(re.findall(r'"(.+?)"', listed)) == sorted(wanted)


def test_the_compose_file_starts_the_service_when_the_database_is_there():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["service"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert services["service"]["ports"] == ["127.0.0.1:8400:8400"]
    assert int(services["service"]["stop_grace_period"].removesuffix("s")) > TO_END
    url = services["service"]["environment"]["BATCHWRIGHT_DATABASE"]
    given = services["database"]["environment"]
    assert url == (
        f"postgresql://{given['POSTGRES_USER']}:${{POSTGRES_PASSWORD}}"
        f"@database/{given['POSTGRES_DB']}"
    )


def unit_in(name):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / name).read_text().replace("\\\n", " "))
    return unit


def test_the_unit_waits_for_requests_in_progress():
    unit = unit_in("batchwright.service")
    assert unit["Service"]["ExecStart"].endswith("/batchwright serve")
    assert int(unit["Service"]["TimeoutStopSec"]) > TO_END
    assert unit["Service"]["User"] != "root"


def test_the_agents_unit_leaves_gpus_and_data_in_reach():
    service = unit_in("batchwright-agent.service")["Service"]
    for closed in ("PrivateDevices", "ProtectClock", "DeviceAllow", "MemoryDenyWriteExecute"):
        assert closed not in service
    assert service["ProtectHome"] == "read-only"
    assert service["User"] != "root"


def test_the_agents_unit_gives_it_time_for_a_checkpoint():
    service = unit_in("batchwright-agent.service")["Service"]
    assert service["KillMode"] == "mixed"  # its trainings are told by the agent, not by systemd
    assert int(service["TimeoutStopSec"]) > LAST_SECONDS
    assert int(service["SuccessExitStatus"]) == 128 + signal.SIGTERM


def test_the_agents_unit_calls_it_with_options_that_it_has():
    _, _, words = unit_in("batchwright-agent.service")["Service"]["ExecStart"].partition(" agent ")
    known = {
        option for p in typer.main.get_command(app).commands["agent"].params for option in p.opts
    }
    given = shlex.split(words)
    assert {word for word in given if word.startswith("--")} <= known
    assert allowed([given[given.index("--allow") + 1]])


def test_no_secret_and_no_address_of_anybody_is_in_the_examples():
    for path in DEPLOY.iterdir():
        text = path.read_text()
        assert not re.search(r"bw_[\w-]{20}", text)
        assert not re.search(r"PASSWORD[=:] *[a-z0-9]{6}", text)
