"""Trainable models and their planners."""
