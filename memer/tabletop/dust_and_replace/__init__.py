"""Dust and replace: world, cameras, controller."""
