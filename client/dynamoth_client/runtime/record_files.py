"""Reads the records of files: JSON lines, CSV, Parquet."""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamoth.data.datasets import Dataset
from dynamoth.errors import ConfigError
from dynamoth.protocol.wire import shortened


def read_records(path: Path, dataset: Dataset) -> Iterator[bytes]:
    """Yield the records of a file as JSON. Raises ConfigError: it cannot be read, or lacks a column."""
    try:
        match path.suffix:
            case ".jsonl" | ".ndjson" | ".json":
                with path.open("rb") as lines:
                    texts = (line.removeprefix(BOM_UTF8).strip() for line in lines)
                    yield from (text for text in texts if text)
            case ".csv":
                with path.open(newline="", encoding="utf-8-sig") as rows:
                    reader = csv.DictReader(rows)
                    _check_columns(path, dataset, reader.fieldnames)
                    yield from (json.dumps(_typed(row, dataset)).encode() for row in reader)
            case ".parquet":
                parquet: Any = import_module("pyarrow.parquet")
                file = parquet.ParquetFile(path)
                _check_columns(path, dataset, file.schema_arrow.names)
                for batch in file.iter_batches():
                    yield from (json.dumps(row, default=_as_text).encode() for row in batch.to_pylist())
            case suffix:
                raise ConfigError(f"{path}: a file ends with .jsonl, .csv or .parquet, not with {suffix!r}")
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet files need pyarrow: pip install 'dynamoth[record]'") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _check_columns(path: Path, dataset: Dataset, columns: Sequence[str] | None) -> None:
    """Check that a table has a column for each field that may not be missing; an empty file has none and no records."""
    if columns is None:
        return
    missing = [field.name for field in dataset.fields if not field.is_optional and field.name not in columns]
    if not missing:
        return
    found = shortened(", ".join(columns))
    cure = ": columns of CSV are separated by commas" if path.suffix == ".csv" and len(columns) == 1 else ""
    raise ConfigError(f"{path}: the file has the columns {found}, and none for the field {missing[0]!r}{cure}")


def _typed(row: Mapping[str, str], dataset: Dataset) -> dict[str, Any]:
    """Return a row of a CSV file with the types of the dataset; an empty value is none."""
    values: dict[str, Any] = {}
    for name, text in row.items():
        field = dataset.by_name.get(name)
        if text == "" and field is not None and (field.is_optional or field.type != "string"):
            continue
        values[name] = text
        try:
            if field is not None and field.type in ("int", "float"):
                values[name] = int(text) if field.type == "int" else float(text)
            elif field is not None and field.type == "bool" and text.lower() in ("true", "false"):
                values[name] = text.lower() == "true"
        except ValueError:
            pass  # the dataset refuses it, and says why
    return values


def _as_text(value: Any) -> str:
    if hasattr(value, "isoformat"):
        text: str = value.isoformat()
        return text if "+" in text or not hasattr(value, "tzinfo") else f"{text}+00:00"
    return str(value)
