"""RMBench demonstrations (HDF5 and language annotations), read with h5py and Pillow alone."""

from data.rmbench.annotations import MergeRule
from data.rmbench.reader import RMBenchReader

__all__ = ["MergeRule", "RMBenchReader"]
