"""Object search: world, cameras, controller."""
