"""Counting scoops: world, cameras, controller."""
