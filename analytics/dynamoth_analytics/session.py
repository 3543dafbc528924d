"""Opens the Spark session of a command: local, a cluster's, or Spark Connect."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from dynamoth.errors import ConfigError
from dynamoth_analytics.errors import SparkFailed, spark_errors, translated

JAVA_MIN = 17
JAVA_PACKAGE = "openjdk-17-jre-headless"
CONNECT_TIMEOUT_S = 5.0
JAVA_TIMEOUT_S = 60.0

RESULT_BYTES_MAX = "64m"
"""Most that one action may return to the driver: enough for a page, far too little for a table."""

DRIVER_MEMORY = "3g"
"""Of a local session, which has no other processes."""

SESSION_OPTIONS = {
    "spark.sql.session.timeZone": "UTC",
    # Dates and hours in the names of folders stay text.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # A figure that cannot be computed is unknown (null): one odd row does not end a report.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # Nothing in SQL stands for variables of the environment, which may be secrets.
    "spark.sql.variable.substitute": "false",
    # A recorder may merge files while they are read.
    "spark.sql.files.ignoreMissingFiles": "true",
}

DRIVER_OPTIONS = {
    "spark.driver.maxResultSize": RESULT_BYTES_MAX,
    "spark.ui.showConsoleProgress": "false",  # it would be among our own lines
    # PySpark would note where each expression was written: a fifth of the time of a small report.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""Of a session whose driver this process starts: a Spark Connect server has its own."""

LOCAL_OPTIONS = {
    "spark.driver.memory": DRIVER_MEMORY,
    "spark.sql.shuffle.partitions": "16",
    "spark.ui.enabled": "false",
    # Nothing of it listens where others can reach it, and processes of this machine need a secret.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.authenticate": "true",
}

LOCAL = "local[*]"
MASTER = re.compile(r"local$|local\[(?:\*|[1-9]\d*)(?:,\s*\d+)?\]$|local-cluster\[|spark://|yarn$|k8s://")

LOG_LEVELS = ("off", "error", "warn", "info")
LOG_FILE = Path(__file__).with_name("log4j2.properties")


def add_session(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where Spark runs."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--master", metavar="URL", help="a Spark cluster (spark://host:7077, yarn ...); default local[*]"
    )
    place.add_argument("--remote", metavar="URL", help="a Spark Connect server (sc://host:15002)")
    parser.add_argument("--spark-log", choices=LOG_LEVELS, default="off", help="level of Spark's own log; default off")


@contextmanager
def open_session(arguments: argparse.Namespace, name: str, java_options: str = "") -> Generator[SparkSession]:
    """Open a session with the arguments of :func:`add_session`, and stop it at the end.

    ``java_options``: of a driver that this starts.

    Raises:
        ConfigError: packages for Spark Connect are missing.
        SparkFailed: Spark does not start.

    """
    # No job here hands pandas anything but plain columns.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    # Spark Connect warns of a window without partitions. The only one here has one row per channel.
    warnings.filterwarnings("ignore", "WARN WindowExpression", UserWarning)
    builder = SparkSession.builder.appName(name).config(map={**SESSION_OPTIONS})
    if arguments.remote:
        builder = builder.remote(arguments.remote)
    else:
        builder = builder.config(map={**DRIVER_OPTIONS})
        if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit has started Java, and chosen the master
            builder = builder.master(arguments.master or LOCAL)
            options = f"-Dlog4j2.configurationFile={LOG_FILE.as_uri()} {java_options}".rstrip()
            builder = builder.config("spark.driver.extraJavaOptions", options)
        if arguments.master is None or arguments.master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers import this package, too
            builder = builder.config(map={**LOCAL_OPTIONS})
    at_interrupt = signal.getsignal(signal.SIGINT)
    try:
        session = builder.getOrCreate()
    except ImportError as error:
        raise ConfigError("--remote needs packages that are not installed: pip install 'pyspark[connect]'") from error
    except Exception as error:  # py4j and grpc have errors of many kinds
        raise translated(error) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, at_interrupt)  # that of PySpark asks Java, maybe in the middle of a call
    try:
        if not arguments.remote:
            session.sparkContext.setLogLevel(arguments.spark_log.upper())
        with spark_errors():
            yield session
    finally:
        session.stop()


def check_session(arguments: argparse.Namespace) -> None:
    """Check that a session can be opened. Spark itself would retry for minutes and print pages.

    Raises:
        ConfigError: no Java, or a URL that Spark does not know.
        SparkFailed: nobody answers at the URL.

    """
    if arguments.remote is not None:
        if not arguments.remote.startswith("sc://"):
            raise ConfigError(f"--remote {arguments.remote}: a URL sc://host:port expected")
        _check_address(arguments.remote, 15002)
        _check_answers(arguments.remote)
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:
        check_java()
        master: str = LOCAL if arguments.master is None else arguments.master
        if not MASTER.match(master):
            raise ConfigError(
                f"--master {master!r} is not a Spark master URL, such as local[*], spark://host:7077, yarn or k8s://..."
            )
        if master.startswith("spark://"):
            _check_address(master, 7077)


def check_java() -> None:
    """Raise ConfigError where there is no Java that Spark can use."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(Path(home, "bin", "java") if home else "java")
    cure = f"install Java {JAVA_MIN} or later (Debian and Ubuntu: {JAVA_PACKAGE}), or set JAVA_HOME"
    if java is None:
        raise ConfigError(f"Spark needs Java, and {'JAVA_HOME has none' if home else 'there is none'}: {cure}")
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{java} does not run ({error}): {cure}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', shown.stderr)
    if found is None or int(found[1]) < JAVA_MIN:
        version = f"is version {found[1]}" if found else "does not print its version"
        raise ConfigError(f"{java} {version}, and Spark needs {JAVA_MIN}: {cure}")


def _check_answers(url: str) -> None:
    """Raise SparkFailed when whoever listens does not speak gRPC: Spark Connect would wait without end."""
    try:
        grpc = import_module("grpc")
    except ImportError:
        return  # to open the session will fail
    if "use_ssl=true" in url.lower():
        return
    place = urlsplit(url).netloc
    with grpc.insecure_channel(place if ":" in place else f"{place}:15002") as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError as error:
            raise SparkFailed(f"what listens at {url} is not a Spark Connect server: is the address right?") from error


def _check_address(url: str, default_port: int) -> None:
    """Raise SparkFailed when nobody listens."""
    errors: list[str] = []
    for address in url.split("://", 1)[1].split("/")[0].split(","):
        try:
            parts = urlsplit(f"//{address}")
            place = parts.hostname or "", parts.port or default_port
            socket.create_connection(place, CONNECT_TIMEOUT_S).close()
        except ValueError as error:
            raise ConfigError(f"{url} is not a URL of Spark: {error}") from error
        except OSError as error:
            errors.append(f"{address}: {error.strerror or error}")
        else:
            return
    raise SparkFailed(f"Spark cannot be reached at {url} ({'; '.join(errors)}): is it running, and the address right?")
