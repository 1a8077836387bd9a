from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import OrderSettings, TrainOrder, validation_batches
from memer.errors import UsageError


def order(
    lengths: list[int], *, batch_size: int = 4, weight: float = 1.0, **choices: int
) -> tuple[TrainOrder, int]:
    groups = np.repeat(np.arange(len(lengths)), lengths)
    made = TrainOrder(
        groups=groups,
        weights=np.full(len(groups), weight),
        settings=OrderSettings(batch_size=batch_size, **choices),
    )
    return made, len(groups)


def stream(made: TrainOrder, places: int) -> list[int]:
    """Sample numbers of the first places of the stream."""
    size = made.settings.batch_size
    batches = [made.batch(number) for number in range(-(-places // size))]
    assert all(len(batch) == size for batch in batches)
    return [sample for batch in batches for sample, _, _ in batch][:places]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_each_epoch_of_the_stream_is_a_permutation(
    lengths: list[int], batch_size: int, lanes: int, clip_steps: int, chunk_clips: int
) -> None:
    made, n = order(
        lengths, batch_size=batch_size, lanes=lanes, clip_steps=clip_steps, chunk_clips=chunk_clips
    )
    places = stream(made, 3 * n)
    for epoch in range(3):
        assert sorted(places[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_differ_and_seeds_repeat() -> None:
    made, n = order([30, 25, 40])
    again, _ = order([30, 25, 40])
    other, _ = order([30, 25, 40], seed=1)
    first = stream(made, 2 * n)
    assert first[:n] != first[n:]
    assert first == stream(again, 2 * n)
    assert first[:n] != stream(other, n)


def test_a_batch_can_be_asked_for_without_its_predecessors() -> None:
    made, _ = order([30, 25, 40])
    fresh, _ = order([30, 25, 40])
    wanted = [made.batch(number) for number in range(200)]
    assert fresh.batch(173) == wanted[173]
    assert fresh.batch(12) == wanted[12]


def test_a_lane_reads_few_episodes_at_a_time() -> None:
    made, _ = order([400] * 12, batch_size=8, lanes=4, clip_steps=40, chunk_clips=2)
    groups = np.repeat(np.arange(12), 400)
    of_lane = [made.batch(number) for number in range(0, 40, 4)]
    episodes = {int(groups[sample]) for batch in of_lane for sample, _, _ in batch}
    assert len(of_lane) * 8 == 80
    assert len(episodes) <= 2


@pytest.mark.parametrize("weight", [1.0, 2.0, 0.5, 2.25])
def test_weights_are_uses_per_epoch(weight: float) -> None:
    made, n = order([13, 8], weight=weight)
    uses = np.stack([made.uses(epoch) for epoch in range(4)])
    assert (uses.sum(axis=0) == 4 * weight).all()
    counted = Counter(stream(made, int(uses[0].sum())))
    assert [counted[k] for k in range(n)] == uses[0].tolist()


def test_uses_of_one_epoch_are_numbered() -> None:
    made, n = order([5, 4], weight=3.0)
    drawn = [use for number in range(20) for use in made.batch(number)][: 3 * n]
    assert Counter(drawn) == {(sample, 0, repeat): 1 for sample in range(n) for repeat in range(3)}


def test_nothing_to_draw_from_is_an_error() -> None:
    with pytest.raises(UsageError, match="no training samples"):
        order([])
    with pytest.raises(UsageError, match="batch_size: 0"):
        OrderSettings(batch_size=0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_validation_sees_each_sample_once_with_equal_batch_counts(
    num_samples: int, batch_size: int, world_size: int, lanes: int
) -> None:
    if num_samples < world_size:
        with pytest.raises(UsageError, match="more episodes"):
            validation_batches(num_samples, batch_size=batch_size, world_size=world_size, lanes=lanes)
        return
    batches = validation_batches(num_samples, batch_size=batch_size, world_size=world_size, lanes=lanes)
    ranks = [list(islice(batches, rank, None, world_size)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(k for batch in batches for k in batch) == list(range(num_samples))
    sizes = {len(batch) for batch in batches}
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + 1
    assert max(sizes) - min(sizes) <= 1
