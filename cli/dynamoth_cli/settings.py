"""Loads the configuration of a command from its flags, the environment and the TOML file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from dynamoth.errors import ConfigError, PlanError
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import Server
from dynamoth.settings.load import ConfigText, FlagValue, LoadedConfig, declared_settings, format_config, load_config
from dynamoth.settings.toml_lines import place_at
from dynamoth_cli.text_files import UnreadableFile, read_text_file
from dynamoth_daemon.logs import configure_logging
from dynamoth_link.options import LinkOptions
from dynamoth_link.tls import TlsOptions
from dynamoth_link.trust import Trust, parse_trusted_hosts, trust_in
from dynamoth_link.urls import ClusterAddress, InvalidUrl, ServerAddress, parse_server_url

_C = TypeVar("_C")

CONFIG_VARIABLE = "DYNAMOTH_CONFIG"

EXAMPLE = "--servers 's1=redis://10.0.0.1:6379 s2=redis://10.0.0.2:6379'"


def add_settings(parser: argparse.ArgumentParser, own_section: str, sections: Sequence[str]) -> None:
    """Add ``--config``, ``--check``, ``--print-config``, and a flag for each setting that is no secret."""
    parser.set_defaults(sections=tuple(sections))
    parser.add_argument("--check", action="store_true", help="check the configuration, and exit with 0 or 2")
    parser.add_argument("--print-config", action="store_true", help="print the configuration in effect, and exit")
    add_section(parser, own_section, *sections)


def add_section(parser: argparse.ArgumentParser, own_section: str, *sections: str) -> None:
    """Add ``--config``, and a flag for each setting of ``sections`` that is no secret."""
    parser.set_defaults(own_section=own_section)
    parser.add_argument("--config", metavar="FILE", help=f"the TOML file of the daemons [{CONFIG_VARIABLE}]")
    for section in sections:
        group = parser.add_argument_group(f"settings [{section}]")
        for declared in declared_settings().values():
            if declared.section == section and not declared.setting.secret:
                group.add_argument(
                    declared.flag(own_section),
                    dest=declared.key,
                    metavar="VALUE",
                    help=declared.help.replace("%", "%%"),
                )
    secrets = [
        each.variable for each in declared_settings().values() if each.setting.secret and each.section in sections
    ]
    if secrets:
        parser.epilog = (
            f"Secrets have no flags, as any user of the machine sees those: use {', '.join(secrets)}."
            f" {parser.epilog or ''}"
        )


def config_file_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the TOML file; None for none."""
    name: str | None = arguments.config or environment.get(CONFIG_VARIABLE)
    return name or None


def load_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> LoadedConfig:
    """Load what the arguments, the environment and the file say. Raises ConfigError."""
    name = config_file_of(arguments, environment)
    given = {
        key: FlagValue(declared.flag(arguments.own_section), value)
        for key, declared in declared_settings().items()
        if (value := getattr(arguments, key, None)) is not None
    }
    return load_config(file=_read(name) if name else None, environment=environment, flags=given)


def run_daemon(
    arguments: argparse.Namespace, make_config: Callable[[LoadedConfig], _C], daemon: Callable[[_C], int]
) -> int:
    """Run a daemon until it ends, or answer ``--print-config`` or ``--check``. Returns the exit code."""
    loaded = load_settings(arguments)
    config = make_config(loaded)
    if arguments.print_config:
        sys.stdout.write(format_config(loaded, arguments.sections))
        return 0
    if arguments.check:
        sys.stderr.write("dynamoth: the configuration is valid\n")
        return 0
    configure_logging(loaded.config.log.level, loaded.config.log.format)
    return daemon(config)


def cluster_servers(loaded: LoadedConfig) -> tuple[Server, ...]:
    """Return the servers of the cluster, at least one, with URLs that can be parsed. Raises ConfigError."""
    settings = loaded.config.cluster.servers
    if not settings:
        raise ConfigError(f"cluster.servers: no server is named: give {EXAMPLE}, or [[cluster.servers]] in the file")
    for index, server in enumerate(settings):
        try:
            parse_server_url(server.url)
        except InvalidUrl as error:
            place = place_at(loaded.places["cluster.servers"], index, "url")
            raise ConfigError(f"cluster.servers[{index}].url: {error} (from {place})") from error
    return tuple(Server(server.id, server.url) for server in settings)


def compatibility_rules(loaded: LoadedConfig) -> tuple[CompatibilityRule, ...]:
    """Return the compatibility rules of a new cluster. Raises ConfigError."""
    settings = loaded.config.cluster.compatibility
    rules = tuple(CompatibilityRule(rule.pattern.encode(), rule.server, rule.plain) for rule in settings)
    try:
        return Compatibility(0, rules).rules
    except PlanError as error:
        place = loaded.places["cluster.compatibility"]
        raise ConfigError(f"cluster.compatibility: {error} (from {place})") from error


def link_options(
    loaded: LoadedConfig, client_name: str | None = None, also: Sequence[ServerAddress] = ()
) -> LinkOptions:
    """Return the options of all links of a process; servers in ``also`` get its credentials, too.

    Raises ConfigError, also for TLS files that cannot be used.
    """
    link = loaded.config.link
    options = LinkOptions(
        username=link.username or None,
        password=_password(loaded),
        trust=trust_of(loaded, *also),
        client_name=client_name,
        tls=TlsOptions(
            ca_file=link.tls_ca_file or None,
            cert_file=link.tls_cert_file or None,
            key_file=link.tls_key_file or None,
            verify=link.tls_verify,
        ),
        connect_timeout_s=link.connect_timeout_s,
        ping_interval_s=link.ping_interval_s,
        ping_timeout_s=link.ping_timeout_s,
    )
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        file: str = getattr(link, name)
        if file and not (os.path.isfile(file) and os.access(file, os.R_OK)):  # OpenSSL reads devices without an end
            raise loaded.fault(f"link.{name}", file, "a file that can be read")
    try:
        options.tls.make_context()
    except OSError as error:
        raise ConfigError(f"link.tls_*: the TLS files cannot be used: {error}: check certificate and key") from error
    return options


def redis_py_tls(loaded: LoadedConfig) -> dict[str, str]:
    """Return section ``[link]``'s TLS as arguments of redis-py, which can be options of a URL, too."""
    link = loaded.config.link
    files = {"ssl_ca_certs": link.tls_ca_file, "ssl_certfile": link.tls_cert_file, "ssl_keyfile": link.tls_key_file}
    return {
        **{name: file for name, file in files.items() if file},
        "ssl_cert_reqs": "required" if link.tls_verify else "none",
    }


def cluster_url(loaded: LoadedConfig, link: LinkOptions) -> str:
    """Return the URL of the cluster for a client, with the credentials and the TLS of section ``[link]``."""
    servers = [parse_server_url(server.url) for server in cluster_servers(loaded)]
    logged_in = tuple(server.with_credentials(link.username, link.password) for server in servers)
    tls = tuple(redis_py_tls(loaded).items()) if logged_in[0].tls else ()
    return ClusterAddress(logged_in, tls).url()


def trust_of(loaded: LoadedConfig, *named: ServerAddress) -> Trust:
    """Return which servers get credentials: those of the configuration, and those ``named`` besides.

    Raises ConfigError.
    """
    cluster = loaded.config.cluster
    servers = [parse_server_url(server.url) for server in cluster_servers(loaded)] if cluster.servers else []
    try:
        return trust_in([*servers, *named], parse_trusted_hosts(cluster.trusted_hosts))
    except ConfigError as error:
        place = loaded.places.get("cluster.trusted_hosts", "the default")
        raise ConfigError(f"cluster.{error} (from {place})") from error


def _password(loaded: LoadedConfig) -> str | None:
    """Return the password of the links; that of the file where one is given."""
    link = loaded.config.link
    if not link.password_file:
        return link.password or None
    try:
        first, *_ = read_text_file(link.password_file).splitlines() or [""]
    except UnreadableFile as error:
        raise loaded.fault(
            "link.password_file", link.password_file, f"a text file that can be read ({error})"
        ) from error
    if not first:
        raise loaded.fault("link.password_file", link.password_file, "a file with the password in its first line")
    return first


def _read(name: str) -> ConfigText:
    try:
        return ConfigText(name, read_text_file(name))
    except UnreadableFile as error:
        raise ConfigError(
            f"the configuration file {name} cannot be read: {error}: check --config and {CONFIG_VARIABLE}"
        ) from error
