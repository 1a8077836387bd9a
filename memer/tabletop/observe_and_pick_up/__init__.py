"""Observe and pick up: a block is shown, a wall hides it, and its like is to be picked up."""
