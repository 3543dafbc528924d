"""The Spark source of datasets: ``spark.readStream.format("dynamoth")``, and ``spark.read`` for a range.

>>> spark.dataSource.register(DynamothSource)
>>> reports = (
...     spark.readStream.format("dynamoth")
...     .option("logs", "l1=redis://10.0.0.3:6379")
...     .option("dataset", "reports")
...     .load()
... )

Rows have the fields of the dataset, and ``_partition``, ``_offset`` and ``_arrived``. Other options than these are
refused:

==================  ===============================================================================================
``logs``            the log servers, ``ID=URL`` separated by spaces: those of the brokers
``ssl_...``         of log servers with ``rediss://``: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
                    ``ssl_cert_reqs``, as redis-py has them
``dataset``         its name
``durable``         ``true``: the log servers lose nothing when they restart
``archive``         the folder of the data cluster's archive, for records that are no longer at Redis; it has to exist
``fail_on_loss``    ``false``: records that are neither at Redis nor in the archive are left out; else an error
``from``            ``begin`` (default): from the first record on; ``retained``: from the oldest one that is still
                    kept; of a stream also ``now``: what is stored from now on
``loaded``          of a batch: which load of a static dataset; the latest if it is missing
``loads``           of a batch: a folder, where each load of a static dataset is copied when it is read first. An hour
                    after the next load it is only there
``start``, ``end``  offsets as JSON: the range of a batch; ``start`` also where a stream begins. Each is the offset of a
                    record (ends of windows are), or 0
==================  ===============================================================================================
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import partition_name, partition_names
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.identity import check_ids, check_places
from dynamoth_analytics.cluster.options import check_names, read_flag, read_offsets
from dynamoth_analytics.cluster.servers import TLS_OPTIONS, LogServers, read_servers
from dynamoth_analytics.cluster.sink import BatchWriter, StreamWriter
from dynamoth_analytics.cluster.storage.batches import record_schema
from dynamoth_analytics.cluster.storage.loads import LoadCopies, load_lost, load_offsets, read_copy
from dynamoth_analytics.cluster.storage.reading import oldest, read_range
from dynamoth_analytics.cluster.windows import ends_of

_BEGINS = ("begin", "retained", "now")

OPTIONS = (
    "logs", "dataset", "durable", "archive", "fail_on_loss", "from", "loaded", "loads", "start", "end", *TLS_OPTIONS,
)  # fmt: skip
"""All options of the source."""


@dataclass
class _Range(InputPartition):
    """A range of a partition, which one task reads."""

    number: int
    after: int
    until: int


@dataclass
class _Copied(InputPartition):
    """A file of a copied load that one task reads."""

    path: Path


@dataclass(frozen=True)
class _Place:
    """A dataset and where it is stored: all that a task needs to read it."""

    servers: LogServers
    dataset: Dataset
    archive: Path | None
    fail_on_loss: bool = True

    def retained(self) -> dict[str, int]:
        """Return the offsets before the oldest records that are still kept."""
        return {
            partition_name(self.dataset.stream, number): oldest(self.servers, self.dataset, number, self.archive)
            for number in range(self.dataset.partitions)
        }

    def ranges(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[_Range]:
        """Return the ranges between offsets, one for each partition that has new records."""
        found: list[_Range] = []
        for number in range(self.dataset.partitions):
            name = partition_name(self.dataset.stream, number)
            after, until = start.get(name, 0), end.get(name, 0)
            if until > after:
                found.append(_Range(number, after, until))
        return found

    def read(self, part: InputPartition) -> Iterator[Any]:
        """Yield the Arrow batches of a range."""
        if isinstance(part, _Copied):
            return read_copy(part.path, self.dataset)
        assert isinstance(part, _Range), "ranges made it"
        return read_range(
            self.servers, self.dataset, part.number, part.after, part.until, self.archive,
            fail_on_loss=self.fail_on_loss,
        )  # fmt: skip


class DynamothSource(DataSource):
    """Registered as ``dynamoth``.

    Its methods raise ConfigError (an option is wrong, or there is no such dataset) and LogServerFailed.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "dynamoth"

    def _place(self) -> _Place:
        check_names(self.options, OPTIONS, "source")
        durable = read_flag(self.options, "durable", default=False)
        fail_on_loss = read_flag(self.options, "fail_on_loss", default=True)
        servers = read_servers(self.options.get("logs", ""), durable=durable, options=self.options)
        check_ids(servers, "option logs")
        check_places(servers, "option logs")
        if not (name := self.options.get("dataset")):
            raise ConfigError("option `dataset` is missing: `dynamoth dataset list` shows the names")
        dataset = servers.catalog().dataset(name)
        if dataset is None:
            raise ConfigError(f"there is no dataset {name!r}: `dynamoth dataset list` shows those that there are")
        if (loaded := self.options.get("loaded")) is not None:
            if not loaded.isdecimal():
                raise ConfigError(f"option loaded is the number of a load, not {loaded!r}")
            dataset = replace(dataset, loaded=int(loaded))
        if (begin := self.options.get("from", "begin")) not in _BEGINS:
            raise ConfigError(f"option from is one of {', '.join(_BEGINS)}, not {begin!r}")
        archive = self.options.get("archive")
        if archive and not Path(archive).is_dir():
            raise ConfigError(
                f"option archive: there is no folder {archive!r}: it is `archive` below `data_cluster.folder`"
            )
        return _Place(servers, dataset, Path(archive) if archive else None, fail_on_loss)

    def schema(self) -> StructType:
        """Return the columns: those of the dataset's definition, and three of ours."""
        return from_arrow_schema(record_schema(self._place().dataset))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a range."""
        place = self._place()
        start, end = read_offsets(self.options, "start"), read_offsets(self.options, "end")
        if place.dataset.kind == "static":
            loads = self.options.get("loads")
            return _LoadReader(place, Path(loads) if loads else None)
        if not start and self.options.get("from") == "retained":
            start = place.retained()
        if end is None:
            end = place.servers.tips({place.dataset.stream: place.dataset.partitions})
        return _Reader(place, start or {}, end)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        return _StreamReader(self._place(), dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer that publishes a DataFrame: see ``sink``."""
        if overwrite:
            raise ConfigError('channels cannot be overwritten: use mode("append")')
        return BatchWriter(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer that publishes the batches of a stream: see ``sink``."""
        return StreamWriter(self.options, schema)


class _Reader(DataSourceReader):
    def __init__(self, place: _Place, start: Mapping[str, int], end: Mapping[str, int]) -> None:
        self._place = place
        self._start = start
        self._end = end

    def partitions(self) -> Sequence[InputPartition]:
        return self._place.ranges(self._start, self._end) or [_Range(0, 0, 0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._place.read(partition)


class _LoadReader(DataSourceReader):
    """Reads a load of a static dataset: its copy, where there is a folder for those."""

    def __init__(self, place: _Place, loads: Path | None) -> None:
        self._place = place
        self._loads = loads

    def partitions(self) -> Sequence[InputPartition]:
        servers, dataset = self._place.servers, self._place.dataset
        if self._loads is not None:
            parts = [_Copied(path) for path in LoadCopies(servers, self._loads).files(dataset)]
            return parts or [_Range(0, 0, 0)]
        end = load_offsets(servers, dataset) if dataset.loaded else {}
        if end is None:
            raise load_lost(dataset, "the option `loads` is missing")
        return self._place.ranges({}, end) or [_Range(0, 0, 0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._place.read(partition)


class _StreamReader(DataSourceStreamReader):
    """The offsets of a stream are the last ones of each partition: ``{"offsets": {"reports/0": 17}}``."""

    def __init__(self, place: _Place, options: Mapping[str, str]) -> None:
        self._place = place
        self._begin = options.get("from", "begin")
        self._start = read_offsets(options, "start")
        self._counts = {place.dataset.stream: place.dataset.partitions}

    def initialOffset(self) -> dict[str, Any]:
        if self._start is not None:
            return {"offsets": self._start}
        if self._begin == "now":
            return {"offsets": self._place.servers.tips(self._counts)}
        if self._begin == "retained":
            return {"offsets": self._place.retained()}
        return {"offsets": dict.fromkeys(partition_names(self._place.dataset), 0)}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        states = self._place.servers.states(self._counts)
        return {"offsets": ends_of(states, start["offsets"], fail_on_loss=self._place.fail_on_loss)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._place.ranges(start["offsets"], end["offsets"]) or [_Range(0, 0, 0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._place.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: records are trimmed when they are archived."""
