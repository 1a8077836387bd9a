"""Views: pure functions from (episode, step, config) to training samples."""
