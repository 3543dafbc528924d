"""What the process of a balancer refuses."""

from __future__ import annotations

import pytest

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Server
from dynamoth_balancer.process.runtime import BalancerConfig


def test_what_cannot_be_configured() -> None:
    with pytest.raises(ConfigError, match="at least one server"):
        BalancerConfig(servers=())
    with pytest.raises(ConfigError, match="http"):
        BalancerConfig(servers=(Server("s1", "http://somewhere"),))
