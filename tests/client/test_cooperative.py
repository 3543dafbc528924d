"""The synchronous client under gevent and eventlet, in processes of their own: they replace the standard library."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from dynamoth.plan.plan import Plan, Server
from tests.client.conftest import ClusterFactory
from tests.client.cooperative import SCENARIOS, publish_and_read
from tests.client.stored_cluster import StoredCluster
from tests.redis_servers import RedisServerFactory
from tests.tls import make_certificates, tls_in_front_of

TIMEOUT_S = 200.0
"""Of all scenarios; each wait in them has a bound of its own."""


@pytest.mark.parametrize("scheduler", ["gevent", "eventlet"])
def test_the_client_works_under_a_cooperative_scheduler(
    redis_server_factory: RedisServerFactory, cluster_factory: ClusterFactory, tmp_path: Path, scheduler: str
) -> None:
    """Every scenario has a server of its own. The first one is repeated with TLS."""
    certificates = make_certificates(tmp_path)
    server = redis_server_factory()
    with tls_in_front_of(server.port, certificates) as port:
        secured = StoredCluster([server])
        secured.plan = Plan.initial([Server("s1", f"rediss://localhost:{port}")])
        secured.store()
        scenarios = [(publish_and_read.__name__, f"rediss://localhost:{port}?ssl_ca_certs={certificates.authority}")]
        scenarios += [(scenario.__name__, cluster_factory(1).url) for scenario in SCENARIOS]
        command = [sys.executable, "-P", "-W", "error", "-m", "tests.client.patched", scheduler, *chain(*scenarios)]
        path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended.stderr
