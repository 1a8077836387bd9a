"""Sharded over two processes, the executor computes what it computes whole."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.models.wap_samples import random_batch, small_model


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    whole, sharded = small_model(), small_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.mot.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    batch = random_batch(whole.settings)
    worst = 0.0
    expected, _ = whole.loss(batch, generator=torch.Generator().manual_seed(0))
    loss, _ = sharded.loss(batch, generator=torch.Generator().manual_seed(0))
    expected.backward()
    loss.backward()
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        worst = max(worst, float((ours.grad.full_tensor() - theirs.grad).abs().max()))
    if rank == 0:
        torch.save((float(loss - expected), worst), Path(folder) / "result.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_unit_per_layer_gives_the_gradients_of_the_whole_model(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(work, args=(port, str(tmp_path)), nprocs=2)
    difference, worst = torch.load(tmp_path / "result.pt")
    assert abs(difference) < 1e-5
    assert worst < 1e-5
