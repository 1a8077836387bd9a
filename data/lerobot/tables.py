"""Rows of one episode out of parquet files that may hold many, and their columns as arrays."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memer.errors import MemerError

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


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
        """int64[T] of a whole-number column, nulls and NaN as -1; None if the file lacks it.

        Raises:
            MemerError: the column does not hold whole numbers.
        """
        values = self.numbers(name)
        if values is None:
            return None
        missing = np.isnan(values)
        whole = np.where(missing, -1, values)
        if not (np.isfinite(whole).all() and (whole == np.trunc(whole)).all()):
            raise MemerError(f"column {name} holds fractions, must hold whole numbers")
        return np.asarray(whole, dtype=np.int64)

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """float64[T] of a column with one number per row, nulls as NaN; None if the file lacks it.

        Raises:
            MemerError: the column does not hold one number per row.
        """
        if name not in self.table.column_names:
            return None
        array = _flat(self.table.column(name))
        if isinstance(array.type, _LISTS) and pc.all(pc.equal(pc.list_value_length(array), 1)).as_py():
            array = pc.list_flatten(array)
        try:
            filled = pc.fill_null(pc.cast(array, pa.float64()), float("nan"))
        except pa.ArrowException:
            raise MemerError(
                f"column {name} is stored as {array.type}, must hold one number per row"
            ) from None
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
    if isinstance(array.type, _LISTS):
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

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._kept = None

    def read(self, path: Path, episode: int, *, columns: Collection[str]) -> EpisodeRows:
        """The episode's rows with those of `columns` that the file has.

        Raises:
            MemerError: the file cannot be read.
        """
        footer = _footer(path)
        wanted = [name for name in footer.columns if name in columns or name == "episode_index"]
        pieces: list[pa.Table] = []
        spans: list[tuple[int, int]] = []  # [first, last] row numbers in the file
        with _open(path, footer) as file:
            try:
                for group, bounds in footer.groups_of(episode):
                    offset = footer.offsets[group]
                    if "episode_index" not in footer.columns or bounds == (episode, episode):
                        pieces.append(file.read_row_group(group, columns=wanted))
                        spans.append((offset, offset + pieces[-1].num_rows - 1))
                        continue
                    table = self._group(path, file, group, wanted)
                    mask = pc.fill_null(pc.equal(table.column("episode_index"), episode), False)
                    hits = np.flatnonzero(np.asarray(mask))
                    if len(hits):
                        pieces.append(table.filter(mask))
                        spans.append((offset + int(hits[0]), offset + int(hits[-1])))
                table = pa.concat_tables(pieces) if pieces else file.read_row_groups([], columns=wanted)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(path, error) from None
        extent = spans[-1][1] - spans[0][0] + 1 if spans else 0
        return EpisodeRows(table.combine_chunks(), extent == table.num_rows, footer.columns)

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
    footer = _footer(path)
    has_number = "episode_index" in footer.columns
    groups = [group for group, _ in footer.groups_of(episode)]
    columns = [column, "episode_index"] if has_number else [column]
    with _open(path, footer, buffer_size=1 << 20) as file:
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


@dataclass(frozen=True, slots=True)
class _Footer:
    """What the end of a parquet file says; plain data, safe to keep.

    Attributes:
        metadata: as parsed.
        columns: top-level names.
        offsets: first row of each row group.
        bounds: (min, max) of episode_index per row group, or None without statistics.
    """

    metadata: pq.FileMetaData
    columns: tuple[str, ...]
    offsets: tuple[int, ...]
    bounds: tuple[tuple[int, int] | None, ...]

    def groups_of(self, episode: int) -> Iterator[tuple[int, tuple[int, int] | None]]:
        """Row groups that may hold rows of an episode, with their bounds."""
        for group, bounds in enumerate(self.bounds):
            if bounds is None or bounds[0] <= episode <= bounds[1]:
                yield group, bounds


_FOOTERS: OrderedDict[tuple[str, int, int], _Footer] = OrderedDict()
_MAX_FOOTERS = 16


def column_names(path: Path) -> tuple[str, ...]:
    """Top-level column names of a file.

    Raises:
        MemerError: the file cannot be read.
    """
    return _footer(path).columns


def _footer(path: Path) -> _Footer:
    """The file's footer, kept for the files read last: one file may hold a thousand episodes."""
    try:
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_size)
        if key in _FOOTERS:
            _FOOTERS.move_to_end(key)
            return _FOOTERS[key]
        with pq.ParquetFile(path) as file:
            metadata, columns = file.metadata, tuple(file.schema_arrow.names)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    starts = np.cumsum([0, *(group.num_rows for group in groups)])[:-1]
    bounds = tuple(_bounds(group) for group in groups)
    footer = _Footer(metadata, columns, tuple(int(n) for n in starts), bounds)
    _FOOTERS[key] = footer
    while len(_FOOTERS) > _MAX_FOOTERS:
        _FOOTERS.popitem(last=False)
    return footer


def _open(path: Path, footer: _Footer, *, buffer_size: int = 0) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, metadata=footer.metadata, buffer_size=buffer_size)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> MemerError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return MemerError(f"{path}: cannot be read as parquet ({reason})")


def _bounds(group: pq.RowGroupMetaData) -> tuple[int, int] | None:
    for i in range(group.num_columns):
        column = group.column(i)
        if column.path_in_schema == "episode_index":
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max:
                return None
            return int(statistics.min), int(statistics.max)
    return None
