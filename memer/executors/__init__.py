"""Executors: what turns a plan and an observation into actions."""
