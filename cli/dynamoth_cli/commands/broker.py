"""``dynamoth broker``: an edge broker, which serves end users; with a command, what operators ask of brokers."""

from __future__ import annotations

import argparse
import ssl
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509

from dynamoth.edge.control import parse_location
from dynamoth.edge.log import LogOptions
from dynamoth.errors import ConfigError
from dynamoth.names import SERVER_ID, SERVER_ID_WORDS
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import BrokerSettings, SessionSettings
from dynamoth_broker.events import BrokerOptions
from dynamoth_broker.process.handshake import PATH
from dynamoth_broker.process.runtime import BrokerConfig
from dynamoth_broker.process.runtime import run as run_broker
from dynamoth_broker.process.tokens import Tokens
from dynamoth_cli.commands.broker_orders import add_orders, run_order
from dynamoth_cli.settings import add_settings, cluster_servers, cluster_url, link_options, run_daemon
from dynamoth_client.asyncio import Redis
from dynamoth_link.urls import InvalidUrl, ServerAddress, parse_log_servers

CLIENT_NAME = "dynamoth-broker"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "broker", ("cluster", "link", "broker", "log"))
    add_orders(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM, or carry out a command of an operator."""
    if arguments.action is not None:
        return run_order(arguments)
    return run_daemon(arguments, broker_config, run_broker)


def broker_config(loaded: LoadedConfig) -> BrokerConfig:
    """Return the configuration of a broker. Raises ConfigError."""
    broker = loaded.config.broker
    if not SERVER_ID.fullmatch(broker.id):
        raise ConfigError(f"broker.id: give each broker another name with --id: {SERVER_ID_WORDS}")
    logs = _logs(loaded)
    history = tuple(broker.history.split())
    if history and not logs:
        raise ConfigError(
            "broker.history: channels are to be logged, and there is no log server: give broker.logs, as"
            " 'l1=redis://10.0.0.1:6379 l2=redis://10.0.0.2:6379'"
        )
    presence = tuple(broker.presence.split())
    if presence and not logs:
        raise ConfigError(
            "broker.presence: who is present is kept at log servers, and there is none: give broker.logs, as"
            " 'l1=redis://10.0.0.1:6379 l2=redis://10.0.0.2:6379'"
        )
    if broker.data_cluster and not logs:
        raise ConfigError("broker.data_cluster: datasets and queries are kept at log servers: give broker.logs")
    link = link_options(loaded, CLIENT_NAME, tuple(logs.values()))
    servers = cluster_servers(loaded)
    Tokens(broker.token_keys_file, anonymous=broker.anonymous, now=time.monotonic)  # checks the file
    options = BrokerOptions(
        **values_of(SessionSettings, broker),
        id=broker.id,
        url=_url(loaded),
        location=_location(loaded),
        control={server.id: server.url for server in servers},
        logs={id_: address.url() for id_, address in logs.items()},
        history=history,
        conflate=tuple(broker.conflate.split()),
        presence=presence,
        presence_ttl_s=broker.presence_ttl_s,
        presence_grace_s=broker.presence_grace_s,
        has_data_cluster=broker.data_cluster,
        log=LogOptions(broker.retained_min, broker.log_ttl_s, broker.log_durable),
        alternates=_alternates(loaded),
    )
    return BrokerConfig(
        **values_of(BrokerSettings, broker),
        options=options,
        make_client=partial(_client, cluster_url(loaded, link)),
        link=link,
        tls=_tls(loaded),
    )


def _logs(loaded: LoadedConfig) -> dict[str, ServerAddress]:
    try:
        return parse_log_servers(loaded.config.broker.logs)
    except InvalidUrl as error:
        raise ConfigError(f"broker.logs: {error} (from {loaded.places['broker.logs']})") from error


def _url(loaded: LoadedConfig) -> str:
    """Return where users reach this broker; empty where nobody knows."""
    broker = loaded.config.broker
    if broker.url:
        _check_url(loaded, "broker.url", broker.url)
        return broker.url
    if not broker.port or broker.host in ("", "0.0.0.0", "::", "*"):
        return ""
    host = f"[{broker.host}]" if ":" in broker.host else broker.host
    return f"{'wss' if broker.tls_cert_file else 'ws'}://{host}:{broker.port}{PATH}"


def _location(loaded: LoadedConfig) -> tuple[float, float] | None:
    location = loaded.config.broker.location
    try:
        return parse_location(location) if location else None
    except ValueError as error:
        raise ConfigError(f"broker.location: {error} (from {loaded.places['broker.location']})") from error


def _check_url(loaded: LoadedConfig, key: str, url: str) -> None:
    if urlsplit(url).scheme not in ("ws", "wss") or not urlsplit(url).hostname:
        raise loaded.fault(key, url, "URLs of brokers (wss://HOST/connect)")


def _alternates(loaded: LoadedConfig) -> tuple[str, ...]:
    urls = tuple(loaded.config.broker.alternates.split())
    for url in urls:
        _check_url(loaded, "broker.alternates", url)
    return urls


def _tls(loaded: LoadedConfig) -> ssl.SSLContext | None:
    broker = loaded.config.broker
    if not broker.tls_cert_file:
        return None
    key = broker.tls_key_file or "in the same file, as broker.tls_key_file is not set"
    files = f"certificate {broker.tls_cert_file}, key {key}"
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(broker.tls_cert_file, broker.tls_key_file or None)
        certificate = x509.load_pem_x509_certificate(Path(broker.tls_cert_file).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"broker.tls_*: the TLS files cannot be used: {error} ({files})") from error
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(
            f"broker.tls_cert_file: the certificate {broker.tls_cert_file} has expired ({ended}): renew it"
        )
    return context


def _client(url: str) -> Redis:
    """Return the broker's client of the cluster."""
    client: Redis = Redis.from_url(url, client_name=CLIENT_NAME)
    return client
