"""Rows of tables: parquet files, dataset folders and datasets of the Hugging Face hub (extra `datasets`)."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....models.errors import UsageError
from ..errors import SourceError
from .items import RawRecord


def parquet_records(source: str, path: Path) -> Iterator[RawRecord]:
    """Yield the rows of a parquet file, a batch in memory at a time.

    Raises UsageError without the extra `datasets`, SourceError for a damaged file.
    """
    parquet, arrow = _need("pyarrow.parquet", source), _need("pyarrow", source)
    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=256))
            yield from _numbered(source, (row for batch in batches for row in batch))
    except (OSError, arrow.ArrowException) as error:
        raise _damaged(source, error) from error


def dataset_folder_records(source: str, path: Path) -> Iterator[RawRecord]:
    """Yield the rows of a folder that `datasets.Dataset.save_to_disk` wrote.

    Raises UsageError without the extra `datasets` and for a folder of several splits, SourceError for a damaged one.
    """
    datasets, arrow = _need("datasets", source), _need("pyarrow", source)
    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise _damaged(source, error) from error
    if not isinstance(table, datasets.Dataset):
        raise UsageError(f"expected one split in {source}; found {sorted(table)}; name the folder of one of them")
    yield from _numbered(source, iter(table))


def hub_records(source: str, name: str, split: str) -> Iterator[RawRecord]:
    """Yield the rows of one split of a hub dataset, streamed.

    Raises UsageError without the extra `datasets`, SourceError where the dataset cannot be read.
    """
    datasets = _need("datasets", source)
    try:
        yield from _numbered(source, iter(datasets.load_dataset(name, split=split, streaming=True)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _damaged(source, error) from error


def _numbered(source: str, rows: Iterator[dict[str, Any]]) -> Iterator[RawRecord]:
    for place, row in enumerate(rows, start=1):
        yield RawRecord(source, place, row)


def _need(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"reading {source} needs {module}: pip install 'hiddentap[datasets]'") from error


def _damaged(source: str, error: BaseException) -> SourceError:
    return SourceError(f"expected {source} to be readable to its end; found {error}; restore it and run again")
