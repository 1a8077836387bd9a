"""FSDP with one unit per layer trains as one device does, on two processes of the CPU."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from models.sharding import UNITS, fsdp_strategy
from tests.models.plan_samples import chunks, executor_module, memories, world_module


class Step(nn.Module):
    """The loss of one rank's samples, entered through `forward` as training enters it."""

    def __init__(self, kind: str, *, checkpointing: bool) -> None:
        super().__init__()
        make, samples = (world_module, memories) if kind == "cwm" else (executor_module, chunks)
        self.module = make(activation_checkpointing=checkpointing)
        self.module.configure_model()
        self.model = self.module.model
        self.samples = samples()

    def forward(self, rank: int) -> torch.Tensor:
        batch = self.module.make_collator()(self.samples[2 * rank : 2 * rank + 2])
        return self.module.losses(batch, generator=torch.Generator().manual_seed(rank))[0]


def compare(rank: int, kind: str, checkpointing: bool, store: str) -> None:
    """One of two processes: a step of plain SGD, sharded and on one device, to the same weights."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    plain = Step(kind, checkpointing=checkpointing)
    ((plain(0) + plain(1)) / 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    sharded = FullyShardedDataParallel(
        Step(kind, checkpointing=checkpointing),
        auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    units = list(FullyShardedDataParallel.fsdp_modules(sharded))
    assert len(units) == 1 + 2, "the root and two layers"
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(rank).backward()
    torch.testing.assert_close(sharded.clip_grad_norm_(1e9), norm)
    optimizer.step()
    expected = dict(plain.named_parameters())
    with FullyShardedDataParallel.summon_full_params(sharded):
        for name, parameter in sharded.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=0, msg=name)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["cwm", "wap"])
def test_a_sharded_step_is_the_step_of_one_device(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    mp.spawn(compare, args=(kind, checkpointing, str(tmp_path / "store")), nprocs=2)


def test_the_strategy_of_the_config_names_the_layers() -> None:
    strategy = fsdp_strategy(sharding="SHARD_GRAD_OP")
    assert strategy.sharding_strategy.name == "SHARD_GRAD_OP"
    names = {type(module) for make in (world_module, executor_module) for module in _layers(make())}
    assert names == set(UNITS)


def _layers(module) -> list[nn.Module]:
    module.configure_model()
    return [part for part in module.modules() if type(part) in UNITS]
