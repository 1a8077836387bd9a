"""Sharding of weights over devices: which modules are gathered as one.

Everything in the transformers of world model and executor trains, so a unit never mixes trained and frozen
weights. A unit is one layer that is entered through its own `forward` alone; what lies outside the layers
(embedders, heads) is the root's.
"""

from typing import Literal

from lightning.pytorch.strategies import FSDPStrategy

from models.mot import MoTLayer
from models.wan import CausalBlock

#: Layers of the executor and of the world model.
UNITS = frozenset({MoTLayer, CausalBlock})


def fsdp_strategy(
    *,
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = "FULL_SHARD",
    cpu_offload: bool = False,
) -> FSDPStrategy:
    """Fully sharded data parallel with one unit per layer; checkpoints are whole files.

    Args:
        sharding: `FULL_SHARD` splits weights, gradients and optimizer states, `SHARD_GRAD_OP` all but the
            weights, `HYBRID_SHARD` within a node only.
        cpu_offload: keep what is not in use in the memory of the host.
    """
    return FSDPStrategy(
        auto_wrap_policy=set(UNITS),
        sharding_strategy=sharding,
        cpu_offload=cpu_offload,
        state_dict_type="full",
        use_orig_params=True,
    )
