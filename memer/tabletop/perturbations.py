"""Seeded disturbances of a running episode: freeze, slip, displaced object, drift.

They happen to the world, in demonstrations and in evaluation alike; neither expert nor controller is told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memer.errors import UsageError

FPS = 15
FREEZE_FRAMES = (5, 20)
#: A drifting arm leaves its course by up to this share of every step, in every direction.
DRIFT_SHARE = 0.7
DRIFT_FRAMES = (3, 8)
KINDS = ("freeze", "slip", "displace", "drift")
#: What happens unless told otherwise.
USUAL = KINDS[:3]


def check_kinds(name: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds as a tuple; a UsageError naming `name` where they are none, unknown or no list."""
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise UsageError(f"{name}: {kinds!r}, must be a list of {', '.join(KINDS)}")
    return tuple(kinds)


@dataclass(slots=True)
class Perturbations:
    """Draws at every step whether something happens.

    Attributes:
        probability: chance that an event starts within one second (15 frames), 0..1.
        rng: own stream, so that the layout of an episode does not depend on `probability`.
        kinds: what may happen: the robot stands still (`freeze`), a held thing falls (`slip`), a thing is
            moved (`displace`), a motion leaves its course (`drift`).
        drift: float64[3], by how much of its length a motion leaves its course in this step.
        events: (step, kind) of what did happen.
    """

    probability: float
    rng: np.random.Generator
    kinds: Sequence[str] = USUAL
    events: list[tuple[int, str]] = field(default_factory=list)
    drift: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    _freeze_left: int = 0
    _drift_left: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"Perturbations.probability: {self.probability!r}, must lie in 0..1")
        self.kinds = check_kinds("tabletop perturb_kinds", self.kinds)

    def strike(
        self,
        step: int,
        *,
        slip: Callable[[], bool],
        displace: Callable[[np.random.Generator], bool],
    ) -> bool:
        """Let this step's event happen; True where the robot stands still in this step.

        Args:
            step: the step about to run, for the log.
            slip: makes the held object fall; False where there is nothing to slip.
            displace: moves an object; False where none may be moved now.
        """
        if self._freeze_left > 0:
            self._freeze_left -= 1
            return True
        if self._drift_left > 0:
            self._drift_left -= 1
            return False
        self.drift = np.zeros(3)
        if self.probability == 0.0:
            return False
        if self.rng.random() >= self.probability / FPS:
            return False
        kind = self.kinds[int(self.rng.integers(len(self.kinds)))]
        if kind == "freeze":
            self._freeze_left = int(self.rng.integers(FREEZE_FRAMES[0], FREEZE_FRAMES[1] + 1)) - 1
            happened = True
        elif kind == "drift":
            self._drift_left = int(self.rng.integers(DRIFT_FRAMES[0], DRIFT_FRAMES[1] + 1)) - 1
            self.drift = self.rng.uniform(-DRIFT_SHARE, DRIFT_SHARE, 3)
            happened = True
        else:
            happened = slip() if kind == "slip" else displace(self.rng)
        if happened:
            self.events.append((step, kind))
        return happened and kind == "freeze"
