"""The models as parts of a policy, with random weights (acceptance checks 9 and 10 of the specification)."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from memer.artifact import load_part, write_provenance
from memer.canvas import to_signed
from memer.errors import MemerError, UsageError
from memer.executors.base import ChunkRequest
from memer.executors.oracles import ExecutorOracle, LanguageOracle
from memer.map_closed_loop import PlayedEpisode, rollout_map_wam
from memer.plan_parts import load_parts
from memer.plan_policy import MapWamPolicy
from memer.plan_settings import CodecSettings, TextSettings
from memer.tabletop import make_env
from models.cwm import EvidenceCache
from models.map_planners import ModelExecutor, ModelVisualPlanner
from tests.models.plan_exports import (
    SIZE,
    export_executor,
    export_world_model,
    plan_contract,
    tiny_executor,
    tiny_world_model,
)

CONTRACT = plan_contract()
STATE = np.array([0.1, 0.2, 0.3, 0.0], np.float32)


def pictures(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def visual_planner(contract=CONTRACT, **settings) -> ModelVisualPlanner:
    return ModelVisualPlanner(tiny_world_model(contract), contract, **{"steps": 2, **settings})


def executor(contract=CONTRACT, **settings) -> ModelExecutor:
    return ModelExecutor(tiny_executor(contract), contract, **{"steps": 2, **settings})


def close(a: EvidenceCache, b: EvidenceCache) -> None:
    assert a.num_latents == b.num_latents
    for (k1, v1), (k2, v2) in zip(a.layers, b.layers, strict=True):
        assert torch.allclose(k1, k2, atol=1e-5)
        assert torch.allclose(v1, v2, atol=1e-5)


# -- the world model --------------------------------------------------------------------------------


def test_evidence_grows_by_two_latents_and_equals_a_fresh_computation():
    planner = visual_planner()
    frames = pictures(1 + 8 * 3)
    planner.reset("do it", frames[0], seed=0)
    for k in range(3):
        assert planner.evidence.num_latents == 1 + 2 * k
        planner.plan(f"step {k}", frames[8 * k])
        planner.write_back(frames[1 + 8 * k : 9 + 8 * k], f"step {k}")
    assert planner.evidence.num_latents == 7
    latents = planner.codec.encode(to_signed(frames).transpose(0, 1)[None])
    close(planner.evidence, planner.model.prefill(latents, planner._text("do it")))
    assert planner.encoder.count == planner.decoder.count == 7


def test_a_generated_plan_changes_no_state():
    planner = visual_planner()
    frames = pictures(9)
    planner.reset("do it", frames[0], seed=0)
    planner.write_back(frames[1:], "a")
    evidence = copy.deepcopy(planner.evidence)
    encoder, decoder = planner.encoder, planner.decoder
    plan = planner.plan("b", frames[8])
    assert plan.shape == (8, SIZE, SIZE, 3)
    assert (planner.encoder, planner.decoder) == (encoder, decoder)
    assert planner.evidence.num_latents == evidence.num_latents
    for (k1, v1), (k2, v2) in zip(planner.evidence.layers, evidence.layers, strict=True):
        assert torch.equal(k1, k2)
        assert torch.equal(v1, v2)


def test_the_plan_depends_on_what_is_remembered_and_on_the_text():
    """The same noise and the same present: only the memory of the first frame differs."""
    frames = pictures(10)
    plans = []
    for first in (frames[0], frames[9]):
        planner = visual_planner()
        planner.reset("do it", first, seed=3)
        planner.write_back(frames[1:9], "a")
        plans.append(planner.plan("b", frames[8]))
    assert not np.array_equal(plans[0], plans[1])
    planner.reset("do it", frames[9], seed=3)
    planner.write_back(frames[1:9], "a")
    assert np.array_equal(planner.plan("b", frames[8]), plans[1])
    planner.reset("do it", frames[9], seed=3)
    planner.write_back(frames[1:9], "a")
    assert not np.array_equal(planner.plan("c", frames[8]), plans[1])


def test_current_only_forgets_everything_but_the_present():
    contract = plan_contract(visual_plan="current_only")
    frames = pictures(10)
    plans = []
    for first in (frames[0], frames[9]):
        planner = visual_planner(contract)
        planner.reset("do it", first, seed=3)
        planner.write_back(frames[1:9], "a")
        plans.append(planner.plan("b", frames[8]))
        assert planner.evidence.num_latents == 0
    assert np.array_equal(plans[0], plans[1])


def test_a_world_model_and_a_contract_of_two_kinds_do_not_fit():
    with pytest.raises(MemerError, match="its contract says 'current_only'"):
        ModelVisualPlanner(tiny_world_model(CONTRACT), plan_contract(visual_plan="current_only"))
    with pytest.raises(UsageError, match="steps: 0"):
        visual_planner(steps=0)


# -- the executor --------------------------------------------------------------------------------


def started(part: ModelExecutor, *, seed: int = 0, text: str = "a") -> ModelExecutor:
    part.reset("do it", seed=seed)
    part.start_segment(pictures(9, seed=seed), text)
    return part


def test_the_plan_is_cached_once_per_segment(monkeypatch):
    part = started(executor())
    prefix = part.prefix
    keys = [k.clone() for k, _ in prefix.keys]
    monkeypatch.setattr(part.model, "prefill_plan", None)
    for n in range(3):
        chunk = part.act(pictures(1, seed=n)[0], STATE + n, n / 3)
        assert chunk.actions.shape == (16, 4)
        assert chunk.progress.shape == (16,)
    assert part.prefix is prefix
    assert all(torch.equal(k, kept) for (k, _), kept in zip(prefix.keys, keys, strict=True))


def test_noise_comes_from_the_seed_of_the_episode():
    canvas = pictures(1)[0]
    first, again, other = (
        started(executor(), seed=s).act(canvas, STATE, 0.0).actions.tolist() for s in (1, 1, 2)
    )
    assert first == again != other
    part = started(executor(), seed=1)
    part.act(canvas, STATE, 0.0)
    assert started(part, seed=1).act(canvas, STATE, 0.0).actions.tolist() == first


def test_several_streams_in_one_pass_equal_each_alone():
    whole = executor()
    requests = [ChunkRequest(pictures(1, seed=k)[0], STATE * k, k / 3) for k in range(3)]
    alone = [
        started(whole.fork(), seed=k, text=f"t{k}").act(r.canvas, r.state, r.progress)
        for k, r in enumerate(requests)
    ]
    streams = [started(whole.fork(), seed=k, text=f"t{k}") for k in range(3)]
    for one, shared in zip(alone, whole.act_many(streams, requests), strict=True):
        assert np.allclose(one.actions, shared.actions, atol=1e-4)
        assert np.allclose(one.progress, shared.progress, atol=1e-4)


def test_actions_are_in_the_units_of_the_robot():
    """Statistics of another scale: the same normalised chunk, shifted and stretched."""
    numbers = {"mean": (5.0,) * 4, "std": (2.0,) * 4}
    other = replace(CONTRACT, statistics={**CONTRACT.statistics, "action": numbers})
    model = tiny_executor(CONTRACT)
    canvas = pictures(1)[0]
    plain = started(ModelExecutor(model, CONTRACT, steps=2)).act(canvas, STATE, 0.0).actions
    moved = started(ModelExecutor(model, other, steps=2)).act(canvas, STATE, 0.0).actions
    assert np.allclose(moved, 5 + 2 * plain, atol=1e-4)


def test_misuse_of_the_executor_is_named():
    part = executor()
    with pytest.raises(MemerError, match="reset"):
        part.start_segment(pictures(9), "a")
    part.reset("do it", seed=0)
    with pytest.raises(MemerError, match="start_segment comes before"):
        part.act(pictures(1)[0], STATE, 0.0)
    with pytest.raises(MemerError, match="no plan was given"):
        part.start_segment(None, "a")
    with pytest.raises(MemerError, match="does not classify"):
        started(part).finished(pictures(1)[0], STATE)
    with pytest.raises(MemerError, match="state: shape"):
        started(part).act(pictures(1)[0], STATE[:3], 0.0)


def test_a_full_history_equals_one_pass_over_all_frames():
    contract = plan_contract(executor_context="full_history")
    part = executor(contract)
    frames = pictures(9)
    part.reset("do it", seed=0)
    part.start_segment(None, "a")
    for step, frame in enumerate(frames):
        part.observe(frame)
        if step in (0, 4, 8):
            chunk = part.act(frame, STATE, 0.5)
    assert part.prefix.latents == 8
    fresh = executor(contract)
    fresh.reset("do it", seed=0)
    fresh.start_segment(None, "a")
    for frame in frames:
        fresh.observe(frame)
    fresh._generator.set_state(torch.Generator().manual_seed(0).get_state())
    for _ in range(2):  # the noise of the first two chunks
        for shape in ((1, 16, 4), (1, 16, 1)):
            torch.randn(shape, generator=fresh._generator)
    again = fresh.act(frames[-1], STATE, 0.5)
    assert np.allclose(chunk.actions, again.actions, atol=1e-4)


# -- all together --------------------------------------------------------------------------------


def played(policy: MapWamPolicy, *, steps: int = 60):
    env = make_env("press_button", split="val", index=0, frame_size=SIZE)
    env.time_limit = steps
    (rollout,) = rollout_map_wam([PlayedEpisode(0, env)], policy, batch_size=1)
    return rollout


ROWS = {
    "memory": ({}, {}),
    "without visual plan": ({"visual_plan": "none"}, {"calibration": "none"}),
    "without visual memory": ({"visual_plan": "current_only"}, {}),
    "classification": ({"progress_mode": "classification"}, {"calibration": "none"}),
    "without condition": ({"progress_condition": False}, {}),
    "without calibration": ({}, {"calibration": "none"}),
    "full history": ({"executor_context": "full_history"}, {"calibration": "none"}),
    "plan and task texts": ({"target_text": "plan+global"}, {}),
    "latents as they are": ({"plan_encoding": "episodic"}, {}),
}


@pytest.mark.parametrize(("switches", "settings"), ROWS.values(), ids=ROWS.keys())
def test_every_row_of_switches_runs(switches, settings):
    contract = plan_contract(**switches)
    plan = contract.plan
    seen = plan.visual_plan != "none" and plan.executor_context == "plan"
    visual = visual_planner(contract) if seen else None
    acting = executor(contract)
    policy = MapWamPolicy(
        LanguageOracle(contract),
        visual,
        acting,
        contract,
        **{"replan": 12, "tau": 0.95, "window": 2, "max_segment_steps": 20, **settings},
    )
    rollout = played(policy)
    assert rollout.extra["segments"] >= 2 or rollout.extra["outcome"] == "failure"
    assert all(np.isfinite(row["progress"]) for row in rollout.rows)


def test_real_frames_are_what_the_world_model_remembers():
    """Oracles of language and action: three segments and more, and every record is what the cameras saw."""
    visual = visual_planner()
    policy = MapWamPolicy(
        LanguageOracle(CONTRACT), visual, ExecutorOracle(CONTRACT), CONTRACT, replan=12, window=4
    )
    written = []
    inner = ModelVisualPlanner.write_back

    class Watched(ModelVisualPlanner):
        def write_back(self, frames, text):
            written.append(frames.copy())
            inner(self, frames, text)
            assert self.evidence.num_latents == 1 + 2 * len(written)

    visual.__class__ = Watched
    kept = {}

    def keep(index, finished_policy):
        kept["records"] = finished_policy.records
        kept["visual"] = finished_policy.visual
        finished_policy.reset("next")
        kept["after"] = (finished_policy.records, finished_policy.segments, finished_policy.steps)

    env = make_env("press_button", split="val", index=0, frame_size=SIZE)
    (rollout,) = rollout_map_wam([PlayedEpisode(0, env)], policy, batch_size=1, on_episode=keep)
    assert rollout.extra["outcome"] == "success"
    records = kept["records"]
    assert len(records) == len(written) == rollout.extra["measures"]["asked_presses"] - 1
    assert all(np.array_equal(record.frames, frames) for record, frames in zip(records, written, strict=True))
    assert kept["after"] == ([], [], 0)


def test_parts_take_steps_and_temperature_or_keep_their_own(tmp_path):
    folders = {
        "visual": export_world_model(tmp_path / "cwm", CONTRACT),
        "executor": export_executor(tmp_path / "wap", CONTRACT),
    }
    plain, told = load_parts(folders), load_parts(folders, steps=3, temperature=0)
    assert [part.steps for part in (*plain.values(), *told.values())] == [10, 10, 3, 3]
    assert (plain["executor"].temperature, told["executor"].temperature) == (1.0, 0.0)
    with pytest.raises(UsageError, match="temperature: True"):
        load_parts(folders, temperature=True)


def test_exports_load_as_parts(tmp_path):
    visual = load_part(export_world_model(tmp_path / "cwm", CONTRACT))
    acting = load_part(export_executor(tmp_path / "wap", CONTRACT))
    assert isinstance(visual, ModelVisualPlanner)
    assert isinstance(acting, ModelExecutor)
    reference = started(executor())
    acting.steps = 2
    canvas = pictures(1)[0]
    assert np.array_equal(
        started(acting).act(canvas, STATE, 0.0).actions, reference.act(canvas, STATE, 0.0).actions
    )


@pytest.mark.parametrize(
    ("made_with", "contract", "message"),
    [
        ({}, {"action_horizon": 32}, r"executor.json: action_horizon 16, contract.json beside it means 32"),
        ({}, {"visual_plan": "none"}, r"visual_plan 'memory', contract.json beside it means 'none'"),
        ({"progress_condition": False}, {}, r"progress_condition False, .* means True"),
        ({}, {"progress_mode": "classification"}, r"progress_mode 'modality', .* means 'classification'"),
        ({}, {"text": TextSettings(dim=64)}, r"text_dim 32, .* means 64"),
    ],
)
def test_weights_of_other_switches_than_the_contract_are_refused(tmp_path, made_with, contract, message):
    mixed_export(tmp_path / "x", plan_contract(**made_with), plan_contract(**contract), kind=ModelExecutor)
    with pytest.raises(MemerError, match=message):
        load_part(tmp_path / "x")


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"plan_frames": 4}, r"world_model.json: plan_latents 2, contract.json beside it means 1"),
        ({"target_text": "plan+global"}, r"target_text 'plan', .* means 'plan\+global'"),
        (
            {"codec": CodecSettings(spatial_ratio=2, channels=48)},
            r"config.json: in_channels 192, .* means 48",
        ),
    ],
)
def test_a_world_model_of_other_switches_than_the_contract_is_refused(tmp_path, contract, message):
    mixed_export(tmp_path / "x", plan_contract(), plan_contract(**contract), kind=ModelVisualPlanner)
    with pytest.raises(MemerError, match=message):
        load_part(tmp_path / "x")


def mixed_export(folder, made_with, contract, *, kind) -> None:
    """Weights of one contract beside another one, hashes included."""
    export = export_executor if kind is ModelExecutor else export_world_model
    export(folder, made_with)
    contract.save(folder)
    (folder / "provenance.json").unlink()
    planner = f"models.map_planners:{kind.__name__}"
    write_provenance(folder, planner=planner, base_name="", base_hash="", alpha=1.0, step=0)
