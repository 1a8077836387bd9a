"""Seeded disturbances of a running episode: freeze, slip, displaced object.

They happen to the world, in demonstrations and in evaluation alike; neither expert nor controller is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

FPS = 15
FREEZE_FRAMES = (5, 20)
KINDS = ("freeze", "slip", "displace")


@dataclass(slots=True)
class Perturbations:
    """Draws at every step whether something happens.

    Attributes:
        probability: chance that an event starts within one second (15 frames), 0..1.
        rng: own stream, so that the layout of an episode does not depend on `probability`.
        kinds: what may happen.
        events: (step, kind) of what did happen.
    """

    probability: float
    rng: np.random.Generator
    kinds: tuple[str, ...] = KINDS
    events: list[tuple[int, str]] = field(default_factory=list)
    _freeze_left: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"Perturbations.probability: {self.probability!r}, must lie in 0..1")
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown:
            raise ValueError(f"Perturbations.kinds: {unknown[0]!r}, must be among {', '.join(KINDS)}")

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
        if self.probability == 0.0 or not self.kinds:
            return False
        if self.rng.random() >= self.probability / FPS:
            return False
        kind = self.kinds[int(self.rng.integers(len(self.kinds)))]
        if kind == "freeze":
            self._freeze_left = int(self.rng.integers(FREEZE_FRAMES[0], FREEZE_FRAMES[1] + 1)) - 1
            happened = True
        else:
            happened = slip() if kind == "slip" else displace(self.rng)
        if happened:
            self.events.append((step, kind))
        return happened and kind == "freeze"
