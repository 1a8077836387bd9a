"""LeRobot data sets, v3.x, v2.1 and v2.0, read with pyarrow, PyAV and Pillow alone."""

from data.lerobot.reader import LeRobotReader
from data.lerobot.video import DecodeCounter, decode_counter

__all__ = ["DecodeCounter", "LeRobotReader", "decode_counter"]
