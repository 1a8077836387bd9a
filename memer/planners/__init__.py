"""Planners: what names the next subtask and nominates keyframes."""
