"""Swap blocks: two blocks change places by way of the middle."""
