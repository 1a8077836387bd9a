"""What can be chosen: YAML files for Hydra, and the few lines of Python that launch a command with them."""
