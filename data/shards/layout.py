"""The files of a shard directory and their fields; one home for writer and reader.

    manifest.json    written last: without it the directory is no data set
    contract.json    what the frames obey (fps, cameras, statistics; the rest is bound by views and models)
    index.jsonl      one row per part: where each member lies in its tar
    shard-%06d.tar   WebDataset samples, one part of one episode each:
                     KEY.json, KEY.state.npy, KEY.action.npy, KEY.<frame %06d>.cam<i>.jpg

Frame numbers in member names are the episode's own; `cam<i>` is position i of the contract's camera keys.
"""

from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.jsonl"
TAR_BLOCK = 512


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.tar"


def part_key(episode_index: int, part: int) -> str:
    """WebDataset key of one part."""
    return f"episode_{episode_index:06d}_part_{part:04d}"


def padded(size: int) -> int:
    """Bytes that `size` bytes of content take in a tar."""
    return -(-size // TAR_BLOCK) * TAR_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """One row of index.jsonl.

    Attributes:
        key: WebDataset key.
        shard: number of the shard.
        episode_index: the source's number.
        part: position of the part within its episode.
        start: first frame.
        end: one past the last frame.
        json_at: (offset, size) of the json member, bytes.
        state_at: (offset, size) of the state array.
        action_at: (offset, size) of the action array.
        frame_offsets: byte offsets of the JPEGs, frame by frame, camera by camera within a frame.
        frame_sizes: sizes in the same order.
        statistics: feature -> moments of this part's rows, as `Moments.to_dict` gives them.
    """

    key: str
    shard: int
    episode_index: int
    part: int
    start: int
    end: int
    json_at: tuple[int, int]
    state_at: tuple[int, int]
    action_at: tuple[int, int]
    frame_offsets: tuple[int, ...]
    frame_sizes: tuple[int, ...]
    statistics: dict[str, dict[str, Any]]

    def moved(self, *, shard: int, by: int) -> "PartEntry":
        """The entry after its bytes were copied `by` bytes further into another file."""
        return PartEntry(
            key=self.key,
            shard=shard,
            episode_index=self.episode_index,
            part=self.part,
            start=self.start,
            end=self.end,
            json_at=(self.json_at[0] + by, self.json_at[1]),
            state_at=(self.state_at[0] + by, self.state_at[1]),
            action_at=(self.action_at[0] + by, self.action_at[1]),
            frame_offsets=tuple(offset + by for offset in self.frame_offsets),
            frame_sizes=self.frame_sizes,
            statistics=self.statistics,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PartEntry":
        """Read what `to_dict` wrote."""
        lists = ("json_at", "state_at", "action_at", "frame_offsets", "frame_sizes")
        return cls(**{name: tuple(v) if name in lists else v for name, v in values.items()})
