"""The examples to deploy say what the package says."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path

import yaml

from batchwright.service.serving import GRACE_SECONDS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
WITHOUT = {"torch", "scikit-learn", "pillow", "matplotlib"}


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
    assert int(services["service"]["stop_grace_period"].removesuffix("s")) > GRACE_SECONDS
    url = services["service"]["environment"]["BATCHWRIGHT_DATABASE"]
    given = services["database"]["environment"]
    assert url == (
        f"postgresql://{given['POSTGRES_USER']}:${{POSTGRES_PASSWORD}}"
        f"@database/{given['POSTGRES_DB']}"
    )


def test_the_unit_waits_for_requests_in_progress():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "batchwright.service").read_text())
    assert unit["Service"]["ExecStart"].endswith("/batchwright serve")
    assert int(unit["Service"]["TimeoutStopSec"]) > GRACE_SECONDS
    assert unit["Service"]["User"] != "root"


def test_no_secret_and_no_address_of_anybody_is_in_the_examples():
    for path in DEPLOY.iterdir():
        text = path.read_text()
        assert not re.search(r"bw_[\w-]{20}", text)
        assert not re.search(r"PASSWORD[=:] *[a-z0-9]{6}", text)
