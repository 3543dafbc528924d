"""Makes the provisioner of a balancer, as section ``[fleet]`` of its configuration says."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import ScalingSettings
from dynamoth_balancer.process.local_servers import ProcessProvisioner
from dynamoth_balancer.process.provisioners import CommandProvisioner, PoolProvisioner, Provisioner
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.embedded import RedisServerNotFound, find_redis_server
from dynamoth_cli.settings import cluster_servers, link_options


def fleet_options(loaded: LoadedConfig) -> FleetOptions:
    """Return when servers come and go. Raises ConfigError."""
    try:
        return FleetOptions(**values_of(ScalingSettings, loaded.config.fleet))
    except ConfigError as error:  # of two values that contradict each other; it begins with the name of one
        place = loaded.places.get(f"fleet.{str(error).partition(' ')[0]}", "the default")
        raise ConfigError(f"fleet.{error} (from {place})") from error


def provisioner_of(loaded: LoadedConfig, config_file: str | None) -> Provisioner | None:
    """Return the provisioner that the configuration asks for; None for none.

    ``config_file``: the TOML file, which the agents that the provisioner ``process`` starts read as well.

    Raises ConfigError.
    """
    match loaded.config.fleet.provisioner:
        case "pool":
            return _pool(loaded)
        case "process":
            return _process(loaded, config_file)
        case "command":
            return CommandProvisioner(_program(loaded))
        case _:
            return None


def _pool(loaded: LoadedConfig) -> PoolProvisioner:
    try:
        return PoolProvisioner(loaded.config.fleet.pool.split())
    except ConfigError as error:
        raise ConfigError(f"fleet.pool: {error} (from {loaded.places.get('fleet.pool', 'the default')})") from error


def _program(loaded: LoadedConfig) -> Sequence[str]:
    """Return the operator's program with its arguments."""
    command, accepted = loaded.config.fleet.command, "a program that exists and is executable, with its arguments,"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise loaded.fault("fleet.command", command, f"{accepted} with every quote closed ({error}),") from error
    if not words or shutil.which(words[0]) is None:
        raise loaded.fault("fleet.command", command, f"{accepted} (name its path, and see chmod +x)")
    return words


def _process(loaded: LoadedConfig, config_file: str | None) -> ProcessProvisioner:
    folder = loaded.config.fleet.folder
    if not folder:
        raise loaded.fault("fleet.folder", folder, "a folder for the servers of the provisioner process")
    if user := loaded.config.link.username:
        accepted = "none, as the servers of the provisioner process know no users (pool and command can),"
        raise loaded.fault("link.username", user, accepted)
    try:
        redis_server = str(find_redis_server())
    except RedisServerNotFound as error:
        raise ConfigError(f"fleet.provisioner: process cannot start servers: {error}") from error
    servers = {server.id: server.url for server in cluster_servers(loaded)}

    def agent(id_: str, url: str) -> list[str]:
        known = " ".join(f"{name}={where}" for name, where in {**servers, id_: url}.items())
        file = ["--config", config_file] if config_file else []
        return dynamoth_command("agent", *file, "--server", id_, "--servers", known, "--http-port", "0")

    password = link_options(loaded).password
    return ProcessProvisioner(Path(folder), redis_server, agent, os.environ, password or "")
