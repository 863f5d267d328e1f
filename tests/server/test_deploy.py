"""What docs/deploy holds, as far as it can be checked without Docker or a cluster."""

import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from server.options import read_options
from tests.conftest import ROOT

DEPLOY = ROOT / "docs" / "deploy"


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_dockerfiles_are_clean(name):
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_start_with_flags_that_there_are(name):
    text = (DEPLOY / name).read_text()
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1])
    options = read_options(command, {})
    assert options.port == 8000 and "EXPOSE 8000" in text
    for copied in re.findall(r"-c (\S+)", text):
        assert (ROOT / copied).exists()


def test_manifests_are_valid_and_probe_what_there_is():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    for manifest in (deployment, service):
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = read_options(container["args"], {})
    assert container["ports"][0]["containerPort"] == options.port
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.args.shutdown_timeout + 5
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_compose_and_what_it_mounts_are_there():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            path = DEPLOY / volume.split(":")[0]
            assert path.exists()
            yaml.safe_load(path.read_text())
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["jpaged:8000"]


def test_the_dashboard_asks_for_metrics_that_there_are(fake):
    fake.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2})
    text = fake.get("/metrics").text
    dashboard = json.loads((DEPLOY / "grafana" / "jpaged.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|jpaged):\w+", target["expr"])
    }
    assert len(asked) > 15
    assert [
        name
        for name in sorted(asked)
        if f"\n# TYPE {name} " not in text
        and f"\n{name}{{" not in text
        and f"\n# TYPE {name.removesuffix('_bucket')} " not in text
    ] == []
