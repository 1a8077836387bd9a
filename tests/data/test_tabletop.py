"""Tabletop demonstrations as a source of episodes."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

from conf.compose import compose
from data.build import main
from data.shards import ShardSet
from data.tabletop import TabletopSource
from memer.errors import MemerError, UsageError
from memer.tabletop import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_report_counts_what_the_episodes_hold(task):
    source = TabletopSource(task=task, split="val", num_episodes=3, frame_size=16, perturb=0.3)
    episodes = [source.episode(index) for index in source.indices()]
    report = source.report()
    assert report["episodes"] == report["successes"] == len(episodes)
    assert report["frames"] == sum(episode.num_frames for episode in episodes)
    assert sum(report["segments"].values()) == sum(len(episode.segments) for episode in episodes)
    happened = [kind for episode in episodes for _, kind in episode.metadata["perturbations"]]
    assert sum(report["perturbations"].values()) == len(happened) > 0


def test_an_unpickled_source_gives_the_same_episode():
    source = TabletopSource(task="object_search", num_episodes=2, frame_size=16)
    ours, theirs = source.episode(1), pickle.loads(pickle.dumps(source)).episode(1)
    assert ours.segments == theirs.segments
    assert ours.instructions == theirs.instructions
    for key in source.camera_keys:
        for a, b in zip(ours.cameras[key].frames(), theirs.cameras[key].frames(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_repeated_segments_stay_apart_in_shards(tmp_path):
    source = TabletopSource(task="press_button", num_episodes=3, frame_size=32)
    settings = [
        "source=tabletop",
        "source.task=press_button",
        "source.num_episodes=3",
        "source.frame_size=32",
        f"out={tmp_path / 'out'}",
        "cameras.camera_keys=[base]",
        "cameras.view_width=32",
        "cameras.view_height=32",
        "num_workers=0",
        "progress=false",
    ]
    main(compose("build", settings))
    shards = ShardSet(tmp_path / "out")
    repeated = 0
    for index in source.indices():
        written = shards.segments(index)
        assert written == shards.episode(index).segments == source.episode(index).segments
        repeated += sum(a.label == b.label for a, b in pairwise(written))
    assert repeated > 0


def test_splits_and_seeds_give_other_episodes():
    episodes = [
        TabletopSource(task="object_search", split=split, seed=seed, num_episodes=1, frame_size=16).episode(0)
        for split in ("train", "val", "test")
        for seed in (0, 1)
    ]
    assert len({(e.instructions, e.segments) for e in episodes}) == 6


def test_an_episode_knows_its_source():
    source = TabletopSource(task="dust_and_replace", split="test", num_episodes=4, frame_size=16)
    episode = source.episode(3)
    assert (episode.source, episode.episode_index) == (source.name, 3)
    assert episode.fps == source.fps
    assert tuple(episode.cameras) == source.camera_keys


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"task": "juggle"}, "juggle"),
        ({"split": "all"}, "source.split"),
        ({"num_episodes": 0}, "source.num_episodes"),
        ({"perturb": 2.0}, "source.perturb"),
        (
            {"perturb_kinds": ["drift", "fall"]},
            r"source.perturb_kinds: .*'fall'.* must be a list of freeze, slip",
        ),
        ({"frame_size": 3}, "source.frame_size"),
        ({"seed": -1}, "source.seed"),
    ],
)
def test_wrong_settings_name_the_field(changed, named):
    with pytest.raises(UsageError, match=named):
        TabletopSource(**{"task": "object_search", "num_episodes": 1, **changed})


def test_an_episode_out_of_range_names_the_way_out():
    with pytest.raises(MemerError, match=r"no episode 2.*source\.num_episodes"):
        TabletopSource(task="object_search", num_episodes=2).episode(2)
