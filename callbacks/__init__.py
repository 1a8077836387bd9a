"""What happens during and after a training run: merging, export, rollout, throughput."""
