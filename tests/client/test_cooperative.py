"""The synchronous client under gevent and eventlet, in processes of their own: they replace the standard library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamoth.plan.plan import Plan, Server
from tests.client.conftest import ClusterFactory
from tests.client.cooperative import SCENARIOS, publish_and_read
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S
from tests.redis_servers import RedisServerFactory
from tests.tls import make_certificates, tls_in_front_of


def _run(scheduler: str, scenario: str, url: str) -> None:
    command = [sys.executable, "-P", "-W", "error", "-m", "tests.client.patched", scheduler, scenario, url]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, env=path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended.stderr


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
@pytest.mark.parametrize("scheduler", ["gevent", "eventlet"])
def test_the_client_works_under_a_cooperative_scheduler(
    cluster_factory: ClusterFactory, scheduler: str, scenario: str
) -> None:
    _run(scheduler, scenario, cluster_factory(1).url)


@pytest.mark.parametrize("scheduler", ["gevent", "eventlet"])
def test_tls_works_under_a_cooperative_scheduler(
    redis_server_factory: RedisServerFactory, tmp_path: Path, scheduler: str
) -> None:
    certificates = make_certificates(tmp_path)
    server = redis_server_factory()
    with tls_in_front_of(server.port, certificates) as port:
        url = f"rediss://localhost:{port}"
        cluster = StoredCluster([server])
        cluster.plan = Plan.initial([Server("s1", url)])
        cluster.store()
        _run(scheduler, publish_and_read.__name__, f"{url}?ssl_ca_certs={certificates.authority}")
