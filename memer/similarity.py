"""How alike a plan's frames and the present one are.

Source: MaP-WAM specification, sections 9 (mean absolute RGB difference) and 17 (further options).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PlanSimilarity(Protocol):
    """Distances between pictures, in any unit; smaller is more alike."""

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """float64[M] of uint8[M, H, W, 3] references against one frame uint8[H, W, 3]."""
        ...


@dataclass(frozen=True, slots=True)
class RgbMae:
    """Mean absolute RGB difference, in grey levels 0..255."""

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See PlanSimilarity."""
        difference = np.abs(references.astype(np.int16) - frame.astype(np.int16))
        mean: NDArray[np.float64] = difference.mean(axis=(1, 2, 3), dtype=np.float64)
        return mean
