"""One executor for several tasks: a mixture of shards, one contract, the task's text as a condition."""

from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from data.datamodule import ShardDataModule
from data.shards import BuildSettings, build_shards
from data.tabletop import TabletopSource
from data.views.executor import ExecutorViewConfig
from memer.contract import CameraLayout
from models.collate_plans import ExecutorBatch
from tests.models.plan_samples import SIZE, executor_module

TASKS = ("press_button", "swap_blocks")
LAYOUT = CameraLayout(camera_keys=("base",), view_width=SIZE, view_height=SIZE)
PLAN = {
    "canvas": {
        "height": SIZE,
        "width": SIZE,
        "regions": [{"camera": "base", "y": 0, "x": 0, "height": SIZE, "width": SIZE}],
    },
    "codec": {"spatial_ratio": 2, "channels": 48},
    "action_horizon": 8,
    "frame_stride": 1,
    "target_text": "plan+global",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardDataModule:
    folder = tmp_path_factory.mktemp("tasks")
    for task in TASKS:
        source = TabletopSource(task=task, num_episodes=2, frame_size=16)
        build_shards(source, out=folder / task, settings=BuildSettings(cameras=LAYOUT), progress=False)
    return mixture(folder)


def mixture(folder: Path) -> ShardDataModule:
    return ShardDataModule(
        train={
            task: {"root": folder / task, "weight": weight}
            for task, weight in zip(TASKS, (2, 1), strict=True)
        },
        val=None,
        view=ExecutorViewConfig(contract={"plan": PLAN, "prompt": {"form": "segments"}}),
        batch_size=4,
        num_workers=0,
        seed=0,
    )


def test_statistics_are_those_of_all_tasks_together(data: ShardDataModule) -> None:
    episodes = [
        TabletopSource(task=task, num_episodes=2, frame_size=16).episode(k) for task in TASKS for k in (0, 1)
    ]
    for name in ("state", "action"):
        rows = np.concatenate([getattr(episode, name) for episode in episodes]).astype(np.float64)
        found = data.contract.statistics[name]
        np.testing.assert_allclose(found["mean"], rows.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["std"], rows.std(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["min"], rows.min(axis=0), rtol=1e-6)
    assert data.contract.plan is not None
    assert data.contract.plan.target_text == "plan+global"


def test_two_tasks_train_in_one_mixture(data: ShardDataModule) -> None:
    """Batches hold both; the mixture's contract is the module's; a task's text reaches the actions."""
    module = executor_module(data.contract)
    collate = module.make_collator()
    data.bind(collate)
    seen: list[str] = []

    class Names(pl.Callback):
        def on_train_batch_end(
            self, _trainer: object, _module: object, _out: object, batch: ExecutorBatch, _k: int
        ) -> None:
            seen.extend(sample_id.split("/")[0] for sample_id in batch.sample_ids)

    module.configure_model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Names()],
    )
    trainer.fit(module, data)
    assert set(seen) == set(TASKS)
    assert module.contract == data.contract
    assert not any(torch.equal(value, before[n]) for n, value in module.state_dict().items() if "text" in n)

    batch = collate(data.example_samples(2))
    assert len(set(batch.instructions)) == 2
    module.eval()
    inputs = module.inputs(batch)
    assert inputs.text_global is not None
    losses = [
        module.model.loss(given, generator=torch.Generator().manual_seed(0))[1]["loss_action"]
        for given in (inputs, module.inputs(swapped(batch)))
    ]
    assert losses[0] != losses[1]


def swapped(batch: ExecutorBatch) -> ExecutorBatch:
    """The batch with each sample under the other one's task."""
    return replace(batch, instructions=tuple(reversed(batch.instructions)))
