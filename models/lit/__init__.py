"""Thin LightningModules around the models."""
