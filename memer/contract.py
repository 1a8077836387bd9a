"""The contract: every choice that training, evaluation and the robot must share, in one versioned object.

It is written with the shards, every checkpoint and every exported artifact, and compared at each hand-over; a
difference is an error that shows the differing fields.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.folders import read_json, write_json
from memer.plan_settings import PlanSettings
from memer.settings import build, merge, require, require_counts

CONTRACT_VERSION = 1
CONTRACT_FILE = "contract.json"

MemoryForm = Literal["none", "short", "long", "text", "image", "image_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    """The numbers of the windows and of the memory (one place for export, training, rollout, deployment).

    Attributes:
        frame_subsample: s, raw frames between window members, >= 1.
        recent_frames_length: N, images in the recent window, >= 1.
        keyframes_length: M, memory images at most, >= 0; 0 shows no memory anywhere.
        prediction_horizon: h, subsampled steps that the target label lies ahead, >= 0.
        merge_distance: d, subsampled steps up to which votes join one cluster, >= 0.
    """

    frame_subsample: int = 5
    recent_frames_length: int = 8
    keyframes_length: int = 8
    prediction_horizon: int = 2
    merge_distance: int = 5

    def __post_init__(self) -> None:
        require_counts(
            self,
            frame_subsample=1,
            recent_frames_length=1,
            keyframes_length=0,
            prediction_horizon=0,
            merge_distance=0,
        )

    @property
    def horizon_frames(self) -> int:
        """Raw frames that the target label lies ahead: h * s."""
        return self.prediction_horizon * self.frame_subsample

    @property
    def merge_frames(self) -> int:
        """Raw distance D = d * s up to which votes join one cluster."""
        return self.merge_distance * self.frame_subsample

    @property
    def span_frames(self) -> int:
        """Raw frames from the oldest to the newest window member: (N - 1) * s."""
        return (self.recent_frames_length - 1) * self.frame_subsample


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraLayout:
    """How the views of one time step become one image, stacked from top to bottom.

    Attributes:
        camera_keys: order of the stack, top first.
        view_width: slot width, px.
        view_height: slot height, px.
        stack_mode: `per_view` resizes each view to its slot; `public` stacks first and resizes once.
        fit: `stretch` fills the slot; `letterbox` keeps the aspect ratio on black.
        jpeg_quality: of stored frames, 1..95.
        jpeg_round_trip: frames at use pass through the same JPEG coding as stored ones.
    """

    camera_keys: tuple[str, ...]
    view_width: int = 320
    view_height: int = 180
    stack_mode: Literal["per_view", "public"] = "per_view"
    fit: Literal["stretch", "letterbox"] = "stretch"
    jpeg_quality: int = 90
    jpeg_round_trip: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "camera_keys", tuple(self.camera_keys))
        keys_fine = bool(self.camera_keys) and len(set(self.camera_keys)) == len(self.camera_keys)
        require(keys_fine, self, "camera_keys", "a non-empty list of different camera keys")
        require(self.view_width >= 1, self, "view_width", "a positive number of pixels")
        require(self.view_height >= 1, self, "view_height", "a positive number of pixels")
        require(self.stack_mode in ("per_view", "public"), self, "stack_mode", "per_view or public")
        require(self.fit in ("stretch", "letterbox"), self, "fit", "stretch or letterbox")
        require(1 <= self.jpeg_quality <= 95, self, "jpeg_quality", "between 1 and 95")

    @property
    def stacked_size(self) -> tuple[int, int]:
        """(width, height) of the stacked image, px."""
        return self.view_width, self.view_height * len(self.camera_keys)


#: Written after spec: four statements, then the two keys of the answer.
DEFAULT_SYSTEM_TEXT = (
    "You are a robot program that predicts actions. "
    "The video input from the egocentric camera shows the most recent actions the robot has executed. "
    "The images are selected frames of particular importance from everything the robot has executed so far. "
    "Output the current subtask the robot should execute and nothing else.\n\n"
    "Return a JSON with:\n"
    "- current_subtask: the action that should be executed at the current time step\n"
    "- keyframe_positions: list of 1-indexed positions from the video input where actions change"
)

#: The standard system turn of the form `segments` (MaP-WAM specification, section 6).
SEGMENTS_SYSTEM_TEXT = "You plan the next subtask of a robot. Answer with the instruction only."


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Words and form of question and answer.

    Attributes:
        system_text: the system turn; taken verbatim from the data for a checkpoint trained on public data.
            The standard text follows `form`.
        memory_header: line before the memory images; absent when there are none.
        recent_header: line before the window images.
        history_header: line before the numbered list of earlier subtasks (text memory).
        segment_whitespace: `strip` trims every text piece between images; `keep` leaves newlines.
        answer_style: `spaced` or `compact` JSON.
        answer_positions: whether the answer carries `keyframe_positions`.
        ensure_ascii: escape non-ASCII characters in the answer.
        fold_system: put the system text in front of the user text, without a system turn.
        form: what a question shows: `windows` of recent and remembered frames, or the finished `segments`,
            then the answer is the next instruction alone.
        initial_header: segments: before the first image.
        finished_header: segments: line before the numbered list of finished subtasks.
        nothing_finished: segments: the list when it is empty.
        result_text: segments: between a finished subtask and its image.
        request: segments: last line, `{k}` stands for the number of the subtask asked for.
        snap: segments: `nearest` replaces an answer by the most similar of `Contract.subtasks`.
    """

    system_text: str = DEFAULT_SYSTEM_TEXT
    memory_header: str = (
        "Here are the selected frames from the entirety of the full video that are of particular importance:"
    )
    recent_header: str = "Here is a video of the most recent actions the robot has executed:"
    history_header: str = "Subtasks completed so far:"
    segment_whitespace: Literal["strip", "keep"] = "strip"
    answer_style: Literal["spaced", "compact"] = "spaced"
    answer_positions: bool = True
    ensure_ascii: bool = False
    fold_system: bool = False
    form: Literal["windows", "segments"] = "windows"
    initial_header: str = "Initial observation: "
    finished_header: str = "Finished subtasks:"
    nothing_finished: str = "none"
    result_text: str = " \u2014 result: "
    request: str = "Give subtask {k}."
    snap: Literal["none", "nearest"] = "none"

    def __post_init__(self) -> None:
        if self.form == "segments" and self.system_text == DEFAULT_SYSTEM_TEXT:
            object.__setattr__(self, "system_text", SEGMENTS_SYSTEM_TEXT)
        require(self.snap in ("none", "nearest"), self, "snap", "none or nearest")
        require("{k}" in self.request, self, "request", "a text with {k}, the number asked for")
        require(self.segment_whitespace in ("strip", "keep"), self, "segment_whitespace", "strip or keep")
        require(self.answer_style in ("spaced", "compact"), self, "answer_style", "spaced or compact")
        require(self.form in ("windows", "segments"), self, "form", "windows or segments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Everything a planner's data, training, evaluation and deployment have to agree on.

    Attributes:
        fps: frames per second of the raw frames.
        cameras: layout of the stacked image.
        windows: window and memory numbers.
        prompt: words and form.
        min_pixels: lower area bound of the image processor, px.
        max_pixels: upper area bound, px.
        memory_form: what is shown besides the current frame.
        memory_mode: `strict` (filter, then cap) or `compat` (public semantics).
        history_length: earlier subtasks listed at most (text memory).
        rules_hash: SHA-256 of the canonical keyframe rules, empty before rules are bound.
        model_family: `config.model_type` of the base model, empty before a model is bound.
        statistics: feature -> {mean, std, min, max} lists, from training data only.
        plan: canvas, codec, text and switches of a plan-following policy; None for a planner alone.
        subtasks: labels of the training data, bound with prompts of the form `segments`.
        version: version of this form.
    """

    fps: float
    cameras: CameraLayout
    windows: WindowSettings = field(default_factory=WindowSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    min_pixels: int = 50_176
    max_pixels: int = 115_200
    memory_form: MemoryForm = "image"
    memory_mode: Literal["strict", "compat"] = "strict"
    history_length: int = 16
    rules_hash: str = ""
    model_family: str = ""
    statistics: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    plan: PlanSettings | None = None
    subtasks: tuple[str, ...] = ()
    version: int = CONTRACT_VERSION

    def __post_init__(self) -> None:
        require(self.fps > 0, self, "fps", "positive")
        require(0 < self.min_pixels <= self.max_pixels, self, "min_pixels", "positive and at most max_pixels")
        forms = ("none", "short", "long", "text", "image", "image_text")
        require(self.memory_form in forms, self, "memory_form", "one of " + ", ".join(forms))
        require(self.memory_mode in ("strict", "compat"), self, "memory_mode", "strict or compat")
        require(self.history_length >= 0, self, "history_length", ">= 0")
        # Lists read back from JSON become tuples, so that a contract equals its copy from a file.
        object.__setattr__(self, "statistics", _frozen_statistics(self.statistics))
        object.__setattr__(self, "subtasks", tuple(self.subtasks))
        if self.plan is not None:
            self._check_plan_cameras(self.plan)

    def _check_plan_cameras(self, plan: PlanSettings) -> None:
        known = self.cameras.camera_keys
        for name, keys in (("canvas", plan.canvas.cameras), ("head_camera", (plan.head_camera,))):
            missing = [key for key in keys if key not in known]
            if missing:
                raise UsageError(
                    f"Contract.plan.{name}: no camera {missing[0]!r}; cameras.camera_keys: {', '.join(known)}"
                )

    @property
    def shown_windows(self) -> WindowSettings:
        """The window numbers of this memory form; windows, targets and rollout all use these.

        `none` shows the current frame alone, `long` four windows' worth (32 at the default 8); only the image
        forms keep memory images. Positions always refer to the frames that are shown.
        """
        recent = self.windows.recent_frames_length
        return replace(
            self.windows,
            recent_frames_length={"none": 1, "long": 4 * recent}.get(self.memory_form, recent),
            keyframes_length=self.windows.keyframes_length if "image" in self.memory_form else 0,
        )

    @property
    def shows_history(self) -> bool:
        """Whether the list of earlier subtasks belongs to the input."""
        return "text" in self.memory_form

    def updated(self, values: Mapping[str, Any]) -> "Contract":
        """A copy with some fields set, as a configuration gives them: groups merge at any depth, None keeps.

        Raises:
            MemerError: an unknown field, by name.
        """
        merged = merge(self.to_dict(), values)
        # Statistics of one feature belong together: taken whole, never mixed from two data sets.
        merged["statistics"] = {**self.statistics, **(values.get("statistics") or {})}
        return Contract.from_dict(merged, where="contract settings")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "contract") -> "Contract":
        """Read what `to_dict` wrote; unknown keys and other versions are errors."""
        version = values.get("version")
        if version != CONTRACT_VERSION:
            raise MemerError(f"{where}: contract version {version!r}, this program reads {CONTRACT_VERSION}")
        nested: dict[str, type] = {
            "cameras": CameraLayout,
            "windows": WindowSettings,
            "prompt": PromptSettings,
        }
        kwargs: dict[str, Any] = dict(values)
        for name, kind in nested.items():
            if name in kwargs:
                kwargs[name] = build(kind, kwargs[name], where=f"{where}: {name}")
        if kwargs.get("plan") is not None:
            kwargs["plan"] = PlanSettings.from_dict(kwargs["plan"], where=f"{where}: plan")
        return build(cls, kwargs, where=where)

    def save(self, folder: Path | str) -> Path:
        """Write `contract.json` into `folder`, beside first, then renamed."""
        path = Path(folder) / CONTRACT_FILE
        write_json(path, self.to_dict())
        return path

    @classmethod
    def load(cls, folder: Path | str) -> "Contract":
        """Read `contract.json` of `folder`."""
        path = Path(folder) / CONTRACT_FILE
        if not path.exists():
            raise SourceUnavailableError(f"{path}: no contract there; was this folder made by memer?")
        try:
            return cls.from_dict(read_json(path), where=str(path))
        except MemerError as error:
            if str(path) in str(error):
                raise
            raise type(error)(f"{path}: {error}") from None

    def differences(self, other: "Contract") -> dict[str, tuple[Any, Any]]:
        """Dotted field name -> (ours, theirs) for every field that differs."""
        ours, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        return {
            name: (ours.get(name), theirs.get(name))
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        }

    def check_same(self, other: "Contract", *, what: str, allow: Collection[str] = ()) -> None:
        """Compare at a hand-over.

        Args:
            other: the other side's contract.
            what: names the two sides, for the message.
            allow: dotted field names (or their prefixes) that may differ.

        Raises:
            MemerError: naming every differing field with both values.
        """
        found = {
            name: pair
            for name, pair in self.differences(other).items()
            if not any(name == a or name.startswith(a + ".") for a in allow)
        }
        if found:
            listed = "; ".join(f"{name}: {a!r} against {b!r}" for name, (a, b) in found.items())
            raise MemerError(
                f"contract mismatch, {what}: {listed}; if meant, name the field in allow_mismatch=[...]"
            )


def plan_of(contract: Contract) -> PlanSettings:
    """The plan settings of a contract.

    Raises:
        UsageError: it has none.
    """
    if contract.plan is None:
        raise UsageError(
            "contract.plan: missing; choose a contract with plan settings, e.g. contract=map_tabletop"
        )
    return contract.plan


def _frozen_statistics(statistics: object) -> dict[str, dict[str, tuple[float, ...]]]:
    """The statistics with tuples for lists.

    Raises:
        MemerError: they are no feature -> {name: list of numbers}.
    """
    if not isinstance(statistics, Mapping):
        raise MemerError(f"Contract.statistics: {statistics!r}, must be a group of features")
    frozen: dict[str, dict[str, tuple[float, ...]]] = {}
    for feature, entries in statistics.items():
        for key, numbers in entries.items() if isinstance(entries, Mapping) else [("entries", entries)]:
            listed = isinstance(numbers, list | tuple)
            if not listed or not all(isinstance(number, int | float) for number in numbers):
                raise MemerError(
                    f"Contract.statistics.{feature}.{key}: {numbers!r}, must be a list of numbers"
                )
        frozen[feature] = {key: tuple(numbers) for key, numbers in entries.items()}
    return frozen


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
