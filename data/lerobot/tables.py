"""Rows of one episode out of parquet files that may hold many, and their columns as arrays."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memer.errors import MemerError


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The rows of one episode.

    Attributes:
        table: chosen columns, in row order, one chunk each.
        contiguous: whether the rows lie side by side in the file.
        present: every column of the file.
    """

    table: pa.Table
    contiguous: bool
    present: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def integers(self, name: str) -> NDArray[np.int64] | None:
        """int64[T] of a whole-number column, nulls as -1; None if the file lacks it."""
        if name not in self.table.column_names:
            return None
        column = _flat(self.table.column(name))
        filled = pc.fill_null(pc.cast(column, pa.int64()), -1)
        return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.int64)

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """float64[T] of a scalar column, nulls as NaN; None if the file lacks it."""
        if name not in self.table.column_names:
            return None
        column = _flat(self.table.column(name))
        filled = pc.fill_null(pc.cast(column, pa.float64()), float("nan"))
        return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.float64)

    def texts(self, name: str) -> list[str | None] | None:
        """One text or None per row; None if the file lacks the column."""
        if name not in self.table.column_names:
            return None
        return [None if v is None else str(v) for v in self.table.column(name).to_pylist()]


class VectorError(ValueError):
    """A cell of a vector column has not the declared form.

    Attributes:
        frame: row of the first such cell.
        value: what was found.
    """

    def __init__(self, frame: int, value: str) -> None:
        super().__init__(f"frame {frame}: {value}")
        self.frame = frame
        self.value = value


def vectors(column: pa.ChunkedArray, *, width: int | None) -> NDArray[np.float32]:
    """float32[T, n] of a vector column stored as fixed list, list or scalar; null numbers become NaN.

    Args:
        column: the cells.
        width: declared n, or None to take that of the first row.

    Raises:
        VectorError: a cell is null, has another length, or does not hold numbers.
    """
    array = _flat(column)
    if array.null_count:
        raise VectorError(int(np.flatnonzero(np.asarray(pc.is_null(array)))[0]), "the cell is null")
    if isinstance(array.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        lengths = np.asarray(pc.list_value_length(array))
        expected = width if width is not None else int(lengths[0]) if len(lengths) else 0
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            raise VectorError(int(wrong[0]), f"{int(lengths[wrong[0]])} values, declared {expected}")
        values = pc.list_flatten(array)
    else:
        expected, values = 1, array
        if width not in (None, 1):
            raise VectorError(0, f"a single value, declared {width}")
    try:
        flat = pc.fill_null(pc.cast(values, pa.float64(), safe=False), float("nan"))
    except pa.ArrowException:
        raise VectorError(0, f"stored as {array.type}, not numbers") from None
    with np.errstate(over="ignore"):
        result = np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32)
    return result.reshape(len(array), expected)


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # combine_chunks of zero chunks
        array = pa.array([], column.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return array


class RowReader:
    """Reads rows by episode number, never by the row numbers that the metadata claims.

    Row groups whose statistics name exactly the episode are taken whole; others are read and filtered. The
    last row group that had to be filtered is kept, so that one group for all episodes is read once.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[str, int, tuple[str, ...]], pa.Table] | None = None
        self._schemas: dict[str, tuple[str, ...]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

    def columns(self, path: Path) -> tuple[str, ...]:
        """Top-level column names of a file."""
        key = str(path)
        if key not in self._schemas:
            with _open(path) as file:
                self._schemas[key] = tuple(file.schema_arrow.names)
        return self._schemas[key]

    def read(self, path: Path, episode: int, *, columns: Collection[str]) -> EpisodeRows:
        """The episode's rows with those of `columns` that the file has.

        Raises:
            MemerError: the file cannot be read.
        """
        with _open(path) as file:
            present = tuple(file.schema_arrow.names)
            self._schemas[str(path)] = present
            wanted = [name for name in present if name in columns or name == "episode_index"]
            pieces: list[pa.Table] = []
            spans: list[tuple[int, int]] = []  # [first, last] row numbers in the file
            offset = 0
            try:
                for group in range(file.metadata.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    bounds = _bounds(file, group)
                    if "episode_index" not in present or bounds == (episode, episode):
                        pieces.append(file.read_row_group(group, columns=wanted))
                        spans.append((offset, offset + rows - 1))
                    elif bounds is None or bounds[0] <= episode <= bounds[1]:
                        table = self._group(path, file, group, wanted)
                        mask = pc.fill_null(pc.equal(table.column("episode_index"), episode), False)
                        hits = np.flatnonzero(np.asarray(mask))
                        if len(hits):
                            pieces.append(table.filter(mask))
                            spans.append((offset + int(hits[0]), offset + int(hits[-1])))
                    offset += rows
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(path, error) from None
            nothing = file.read_row_groups([], columns=wanted)
        table = pa.concat_tables(pieces).combine_chunks() if pieces else nothing
        extent = spans[-1][1] - spans[0][0] + 1 if spans else 0
        return EpisodeRows(table, extent == table.num_rows, present)

    def _group(self, path: Path, file: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        key = (str(path), group, tuple(columns))
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, file.read_row_group(group, columns=columns))
        return self._kept[1]


def iterate_cells(path: Path, episode: int, *, column: str, batch_size: int = 16) -> Iterator[object]:
    """Cells of one column of one episode, in row order, with memory bounded by a batch of rows.

    Raises:
        MemerError: the file cannot be read.
    """
    with _open(path, buffer_size=1 << 20) as file:
        has_number = "episode_index" in file.schema_arrow.names
        groups = [
            group
            for group in range(file.metadata.num_row_groups)
            if not has_number or (b := _bounds(file, group)) is None or b[0] <= episode <= b[1]
        ]
        columns = [column, "episode_index"] if has_number else [column]
        try:
            for batch in file.iter_batches(
                batch_size=batch_size, row_groups=groups, columns=columns, use_threads=False
            ):
                numbers = batch.column("episode_index").to_pylist() if has_number else None
                cells = batch.column(column)
                for row in range(batch.num_rows):
                    if numbers is None or numbers[row] == episode:
                        yield cells[row].as_py()
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from None


def _open(path: Path, *, buffer_size: int = 0) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=buffer_size)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> MemerError:
    return MemerError(
        f"{path}: cannot be read as parquet ({(str(error) or type(error).__name__).splitlines()[0]})"
    )


def _bounds(file: pq.ParquetFile, group: int) -> tuple[int, int] | None:
    """(min, max) of episode_index in a row group, or None without statistics."""
    metadata = file.metadata.row_group(group)
    for i in range(metadata.num_columns):
        column = metadata.column(i)
        if column.path_in_schema == "episode_index":
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max:
                return None
            return int(statistics.min), int(statistics.max)
    return None
