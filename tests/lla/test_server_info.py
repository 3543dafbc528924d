from __future__ import annotations

import dataclasses

import pytest

from dynamoth.machine.events import ErrorReply
from dynamoth_lla.server_info import Rates, ServerInfo, parse_info, rates

REDIS_7 = (
    b"# Clients\r\nconnected_clients:12\r\nmaxclients:10000\r\nclient_recent_max_output_buffer:20504\r\n"
    b"# Memory\r\nused_memory:1048576\r\nmaxmemory:2097152\r\nmem_clients_normal:22000\r\n"
    b"# CPU\r\nused_cpu_sys:3.5\r\nused_cpu_user:2.5\r\n"
    b"used_cpu_sys_main_thread:1.25\r\nused_cpu_user_main_thread:2.0\r\n"
    b"# Stats\r\ntotal_net_input_bytes:1000\r\ntotal_net_output_bytes:5000\r\npubsub_channels:3\r\n"
)


def info(text: bytes = REDIS_7) -> ServerInfo:
    return ServerInfo.parse(parse_info(text))


def test_what_a_server_says_is_read() -> None:
    assert info() == ServerInfo(
        net_output_bytes=5000,
        net_input_bytes=1000,
        cpu_s=3.25,
        memory_bytes=1048576,
        memory_bytes_max=2097152,
        connections=12,
        connections_max=10000,
        output_buffer_bytes_max=20504,
        client_buffers_bytes=22000,
        channels_subscribed=3,
    )


def test_without_the_main_thread_the_process_counts() -> None:
    assert info(b"used_cpu_sys:3.5\r\nused_cpu_user:2.5\r\n").cpu_s == 6.0


@pytest.mark.parametrize("reply", [ErrorReply("NOPERM"), None, 5, [b"x"], b"", b"total_net_output_bytes"])
def test_what_is_missing_is_not_known(reply: object) -> None:
    nothing = ServerInfo.parse(parse_info(reply))
    assert nothing.net_output_bytes is None and nothing.cpu_s is None and nothing.connections_max == 0


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5", "9" * 5000, "٣"])
def test_what_is_no_counter_is_not_known(value: str) -> None:
    assert info(f"total_net_output_bytes:{value}\r\n".encode()).net_output_bytes is None


@pytest.mark.parametrize("value", ["nan", "inf", "x"])
def test_what_is_no_time_is_not_known(value: str) -> None:
    assert info(f"used_cpu_sys:{value}\r\nused_cpu_user:1\r\n".encode()).cpu_s is None


def test_rates_are_what_came_in_between() -> None:
    after = dataclasses.replace(info(), net_output_bytes=8000, net_input_bytes=1500, cpu_s=4.25)
    assert rates(info(), after, 2.0, agent_bytes=1000) == Rates(1000.0, 250.0, 0.5)


def test_output_is_never_less_than_nothing() -> None:
    after = dataclasses.replace(info(), net_output_bytes=5100)
    assert rates(info(), after, 1.0, agent_bytes=500).outgoing_bytes_per_s == 0.0


def test_counters_that_went_back_say_nothing() -> None:
    after = dataclasses.replace(info(), net_output_bytes=10, net_input_bytes=10, cpu_s=0.0)
    assert rates(info(), after, 1.0, agent_bytes=0) == Rates(None, None, None)


def test_what_is_unknown_is_what_it_was() -> None:
    assert Rates(None, 2.0, None).or_else(Rates(1.0, 1.0, None)) == Rates(1.0, 2.0, None)
