"""The method of memer in plain Python: formats, windows, memory, prompts, metrics, merging, policies.

Nothing below this package imports a trainer, a configuration system or a model library; what training and
the robot must share lives here once.
"""
