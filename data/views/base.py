"""What a view is: a pure function from episodes to the samples of one model, whatever that model is.

Table, order and data module know views through this protocol alone. A view numbers the samples of an episode
by `steps`; what a step means (a raw frame, a segment, the whole episode) is its own business.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from data.views.frames import FrameProvider
from memer.contract import Contract
from memer.episode import Episode, Segment
from memer.errors import UsageError
from memer.plan_settings import PlanSettings
from memer.sample import ExecutorSample, PlannerSample, VisualPlannerSample

Sample = PlannerSample | VisualPlannerSample | ExecutorSample


class Steps(Protocol):
    """The samples of one episode; views add what their histograms count."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers that `View.sample` takes, ascending."""
        ...

    @property
    def weights(self) -> tuple[float, ...]:
        """How often each step is used per epoch on average, >= 0."""
        ...


class View(Protocol):
    """Samples of one model from labelled episodes.

    Attributes:
        contract: the data's, with the run's choices.
        columns: columns of the episode table that the samples hold; their sizes must agree in a mixture.
        sample_type: class of its samples.
    """

    contract: Contract
    columns: tuple[str, ...]
    sample_type: type

    def targets(self, segments: Sequence[Segment], *, num_frames: int) -> Any:
        """What the labels of one episode ask for; needs no frames.

        Raises:
            MemerError: the labels do not serve this view; the caller names the episode.
        """
        ...

    def steps(self, targets: Any) -> Steps:
        """The samples of an episode."""
        ...

    def sample(
        self,
        episode: Episode,
        t: int,
        *,
        targets: Any = None,
        frames: FrameProvider | None = None,
        epoch: int = 0,
        repeat: int = 0,
    ) -> Sample:
        """The sample of one step: the same for the same arguments, on any machine and in any order.

        Args:
            episode: frames and labels.
            t: one of `steps`.
            targets: from `targets` for this episode, computed when None.
            frames: gives frames, and may keep them between calls; None decodes each time.
            epoch: with `repeat` it seeds noise, where the view makes any.
            repeat: number of this use of the step within its epoch.
        """
        ...

    def histograms(self, plans: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        """Counts to look at before training, as plain JSON values; `samples` and `weighted_samples` always.

        Args:
            plans: (targets, steps) per episode.
        """
        ...

    @property
    def frame_bytes(self) -> int:
        """Bytes of one decoded frame as the samples show it."""
        ...

    def clip_bytes(self, clip_steps: int) -> int:
        """Decoded frames that `clip_steps` neighbouring steps of one episode share, bytes; 0 if none."""
        ...


class FeatureReader(Protocol):
    """Latents and embeddings of one source, computed ahead (data.features)."""

    def latents(self, episode_index: int, kind: str, key: int) -> NDArray[np.float32]:
        """float32[C, F, h, w] of one clip; kinds and keys as `PlanView.clips` names them."""
        ...

    def text(self, text: str) -> NDArray[np.float32] | None:
        """float32[M, T]; None where embeddings were left out."""
        ...

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """float32[len(texts), M, T]; None where embeddings were left out."""
        ...


class PlanReader(Protocol):
    """Plans of one source that a world model imagined (the run's `data.plans`)."""

    def frames(self, episode_index: int, number: int) -> NDArray[np.uint8]:
        """uint8[N, H, W, 3], the plan of a segment, from 0 on."""
        ...


@runtime_checkable
class PlanView(View, Protocol):
    """A view whose samples show canvases, so that a codec can encode them ahead.

    Attributes:
        plan: the contract's plan settings.
        features: source name -> features that stand in for its frames; sources without one show frames.
    """

    plan: PlanSettings
    features: Mapping[str, FeatureReader]

    def feature_key(self) -> dict[str, Any]:
        """What latents and embeddings of a sample depend on besides the shards, as plain values."""
        ...

    def clips(self, t: int, sample: Any, targets: Any) -> dict[str, tuple[int, NDArray[np.uint8]]]:
        """Kind -> (number within the episode, uint8[1 + 4 m, H, W, 3]) of the sample of step t."""
        ...

    def words(self, sample: Any) -> tuple[str, ...]:
        """The texts of a sample."""
        ...


@runtime_checkable
class FollowsPlans(PlanView, Protocol):
    """A view that may show imagined plans in the place of real ones.

    Attributes:
        plan_source: `real`, or one that needs `imagined`.
        imagined: source name -> imagined plans.
    """

    plan_source: str
    imagined: Mapping[str, PlanReader]


class ViewConfig(Protocol):
    """What a run chooses about its view (conf/view); the data's contract joins at `bind`."""

    def bind(self, contract: Contract, *, sample_stride: int | None = None, plain: bool = False) -> View:
        """The view over data of `contract`.

        Args:
            contract: of the shards: fps, cameras and statistics are taken from it.
            sample_stride: raw frames between samples, for validation, where the view has such a stride.
            plain: every step once, without noise, for validation.
        """
        ...


def chosen_contract(contract: Contract, choices: Mapping[str, Any]) -> Contract:
    """The data's contract with the run's choices (conf/contract).

    Raises:
        UsageError: a choice belongs to the data.
    """
    fixed = sorted({"fps", "cameras", "statistics", "version"} & set(choices))
    if fixed:
        raise UsageError(f"contract.{fixed[0]}: fixed by the data; build other shards to change it")
    return contract.updated(choices)
