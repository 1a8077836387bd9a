"""The labeler of discovered segments: dataset labels are kept, provenance travels, the config builds it."""

import json
import pickle

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data.discover import DiscoverLabels
from memer.discover import ChangePoint, Events
from memer.episode import ArrayFrames, Episode, InstructionSpan, Segment
from memer.errors import UsageError


def episode(*segments: Segment) -> Episode:
    return Episode(
        source="desk",
        episode_index=0,
        fps=10,
        cameras={"base": ArrayFrames(np.zeros((40, 4, 4, 3), dtype=np.uint8))},
        state=np.zeros((40, 3), dtype=np.float32),
        action=np.repeat([0.0, 1.0], 20)[:, None].astype(np.float32),
        instructions=(InstructionSpan(0, "tidy up"),),
        segments=segments,
        metadata={"seed": 7},
    )


def test_an_unlabelled_episode_gets_segments_and_their_provenance():
    found = DiscoverLabels(method="events", events={"pauses": False})(episode())
    assert found.segments == (Segment(0, 20, "part 1"), Segment(20, 40, "part 2"))
    assert found.metadata["label_source"] == "discover:events"
    assert found.metadata["seed"] == 7
    story = found.metadata["discovery"]
    assert (story["method"], story["applied"]) == ("events", True)
    assert story["settings"]["pauses"] is False
    assert story["segments"] == [[0, 20, "part 1", 1.0], [20, 40, "part 2", 0.5]]
    json.dumps(found.metadata)


def test_labels_of_the_data_set_are_kept_unless_asked():
    given = episode(Segment(3, 30, "wipe"))
    kept = DiscoverLabels(method="uniform", uniform={"count": 2})(given)
    assert kept.segments == given.segments
    assert "label_source" not in kept.metadata
    assert kept.metadata["discovery"]["applied"] is False
    assert kept.metadata["discovery"]["segments"] == [[0, 20, "part 1", 1.0], [20, 40, "part 2", 1.0]]
    replaced = DiscoverLabels(method="uniform", uniform={"count": 2}, existing="replace")(given)
    assert [s.label for s in replaced.segments] == ["part 1", "part 2"]


def test_a_labeler_travels_to_a_worker():
    labeler = pickle.loads(pickle.dumps(DiscoverLabels(method="uniform", uniform={"count": 4})))
    assert len(labeler(episode()).segments) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "vlm"}, "labels.method='vlm', must be one of uniform, events, change_point"),
        ({"existing": "merge"}, "labels.existing='merge'"),
        ({"label": 3}, "labels.label=3, must be a text"),
        ({"method": "uniform"}, "labels.uniform: .*count"),
        ({"events": {"loud": 1}}, "labels.events: .*loud"),
        ({"method": "uniform", "uniform": {"count": 0}}, "Uniform.count: 0"),
    ],
)
def test_bad_settings_are_refused_before_any_work(settings, message):
    with pytest.raises(UsageError, match=message):
        DiscoverLabels(**settings)


@pytest.mark.parametrize("method", ["uniform", "events", "change_point"])
def test_the_config_group_builds_every_method(method):
    config = OmegaConf.load("conf/labels/discover.yaml")
    config.method = method
    labeler = instantiate(config, _convert_="all")
    assert isinstance(labeler, DiscoverLabels)
    assert labeler(episode()).metadata["discovery"]["method"] == method
    assert {key for key in config if key != "_target_"} == {
        name for name in DiscoverLabels.__dataclass_fields__ if not name.startswith("_")
    }
    for group, kind in (("events", Events), ("change_point", ChangePoint)):
        assert kind(**OmegaConf.to_container(config[group])) == kind(), "the file shows the defaults"
