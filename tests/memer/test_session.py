from dataclasses import replace

import numpy as np
import pytest

from memer.contract import CameraLayout, Contract, WindowSettings
from memer.errors import MemerError, UsageError
from memer.planners.base import PlannerResult
from memer.session import PlannerSession, plan_step
from tests.memer.planner_doubles import PicturePlanner, small_contract

LAYOUT = CameraLayout(camera_keys=("c",), view_width=4, view_height=2, jpeg_round_trip=False)


def numbered(step: int) -> np.ndarray:
    """A prepared frame that holds its own number."""
    frame = np.zeros((2, 4, 3), np.uint8)
    frame[..., 0], frame[..., 1] = step % 256, step // 256
    return frame


def number_of(frame: np.ndarray) -> int:
    return int(frame[0, 0, 0]) + 256 * int(frame[0, 0, 1])


def session_of(**settings: object) -> PlannerSession:
    fields = {key: settings.pop(key) for key in list(settings) if key in Contract.__dataclass_fields__}
    contract = Contract(fps=15.0, cameras=LAYOUT, **fields)
    return PlannerSession(contract, instruction="do it", **settings)


def run_to(session: PlannerSession, step: int) -> None:
    while session.newest < step:
        session.observe(numbered(session.newest + 1), prepared=True)


def answer(*positions: int, subtask: str = "a") -> PlannerResult:
    return PlannerResult(status="ok", subtask=subtask, positions=positions)


def test_request_shows_the_frames_it_names():
    session = session_of()
    run_to(session, 122)
    request = session.request()
    assert request.step == 122
    assert [key[2] for key in request.question.recent_keys] == [87, 92, 97, 102, 107, 112, 117, 122]
    for key, frame in request.question.frames.items():
        assert number_of(frame) == key[2]


def test_votes_become_memory_with_their_own_picture():
    session = session_of()
    run_to(session, 60)
    session.request()
    record = session.apply(answer(2, 2, 9, 0))
    assert record.mapped_keyframe_indices == (30,)  # window 25..60; a repeated position is one vote
    assert record.invalid_keyframe_positions == (9, 0)
    assert record.predicted_keyframe_positions == (2, 2, 9, 0)
    assert record.num_votes == 1
    run_to(session, 200)
    question = session.request().question
    assert [key[2] for key in question.memory_keys] == [30]
    assert number_of(question.frames[question.memory_keys[0]]) == 30


def test_compat_mode_keeps_repeated_votes():
    session = session_of(memory_mode="compat")
    run_to(session, 60)
    session.request()
    assert session.apply(answer(2, 2)).num_votes == 2


def test_failure_leaves_memory_alone_and_keeps_the_last_good_subtask():
    session = session_of()
    run_to(session, 0)
    session.request()
    first = session.apply(PlannerResult(status="parse_error", positions=(1,), error="empty text"))
    assert (first.current_subtask, first.stale, first.parse_ok) == (None, True, False)
    assert first.parse_error == "empty text"
    run_to(session, 40)
    session.request()
    session.apply(answer(1, subtask="stir"))
    before = session.memory.state_dict()
    run_to(session, 52)
    session.request()
    record = session.apply(
        PlannerResult(status="timeout", subtask="never", positions=(2,), raw_text="not this")
    )
    assert session.memory.state_dict()["votes"] == before["votes"]
    assert record.current_subtask == "stir"
    assert record.predicted_subtask is None
    assert record.predicted_keyframe_positions == record.mapped_keyframe_indices == ()
    assert (record.stale, record.stale_steps, record.age_steps, record.age_s) == (True, 12, 12, 12 / 15)
    session.request()
    again = session.apply(answer(subtask="stir"))
    assert (again.stale, again.stale_steps, again.prompt_version) == (False, 0, 1)


@pytest.mark.parametrize("form", ["none", "short", "long", "text"])
def test_forms_without_images_show_no_memory_in_any_mode(form):
    for mode in ("strict", "compat"):
        session = session_of(memory_form=form, memory_mode=mode)
        for t in range(0, 400, 5):
            run_to(session, t)
            request = session.request()
            assert request.question.memory_keys == ()
            record = session.apply(answer(1))
            assert record.memory_indices_before == record.memory_indices_after == ()


def test_memory_length_zero_shows_none_and_keeps_no_pictures():
    session = session_of(windows=WindowSettings(keyframes_length=0))
    for t in range(0, 400, 5):
        run_to(session, t)
        assert session.request().question.memory_keys == ()
        session.apply(answer(1))
        assert len(session.stored_frames) <= 36


def test_frame_store_stays_bounded_over_ten_thousand_frames():
    session = session_of()
    largest = 0
    rng = np.random.default_rng(0)
    for t in range(10_000):
        run_to(session, t)
        if t % 5 == 0:
            session.request()
            # Bursts with pauses, as real nominations come.
            positions = rng.integers(1, 9, 2).tolist() if t % 150 < 40 else []
            session.apply(answer(*positions))
        largest = max(largest, len(session.stored_frames))
    open_frames = len(set(session.memory.open_votes()))
    assert set(session.stored_frames) >= set(range(9_999 - 35, 10_000))
    assert len(session.stored_frames) <= 36 + open_frames + 8
    assert largest <= 36 + 8 + 60
    question = session.request().question
    assert len(question.memory_keys) == 8
    for key, frame in question.frames.items():
        assert number_of(frame) == key[2]


def test_dense_votes_cannot_grow_the_store_without_limit():
    session = session_of()
    for t in range(0, 10_000, 5):
        session.observe(numbered(t), step=t, prepared=True)
        session.request()
        session.apply(answer(*range(1, 9)))
    assert len(session.stored_frames) <= 36 + 512 + 8


def test_frames_may_be_left_out_but_not_those_of_the_window():
    session = session_of()
    for t in range(0, 41, 5):
        session.observe(numbered(t), step=t, prepared=True)
    assert len(session.request().question.recent_keys) == 8
    session.observe(numbered(43), step=43, prepared=True)
    with pytest.raises(MemerError, match="frame 8 is needed at 43"):
        session.request()


def test_frames_that_arrive_during_a_request_do_not_push_out_its_window():
    session = session_of()
    run_to(session, 100)
    session.request()
    run_to(session, 160)
    record = session.apply(answer(1))
    assert record.mapped_keyframe_indices == (65,)
    assert (record.timestep, record.age_steps) == (100, 60)
    question = session.request().question
    assert [number_of(question.frames[key]) for key in question.memory_keys] == [65]


def test_steps_must_grow():
    session = session_of()
    session.observe(numbered(3), step=3, prepared=True)
    with pytest.raises(MemerError, match="observation 3 after 3"):
        session.observe(numbered(3), step=3, prepared=True)


def test_misuse_is_named():
    session = session_of()
    with pytest.raises(MemerError, match="no frame observed"):
        session.request()
    run_to(session, 0)
    with pytest.raises(MemerError, match=r"without a request"):
        session.apply(answer())
    session.instruction = None
    with pytest.raises(MemerError, match="no instruction"):
        session.request()
    with pytest.raises(UsageError, match="predicted, gt, none, shuffled"):
        session_of(memory_source="remembered")
    with pytest.raises(MemerError, match="4 x 3 px"):
        session.observe(np.zeros((3, 4, 3), np.uint8), prepared=True)


def test_the_store_owns_its_frames():
    session = session_of()
    frame = numbered(7)
    session.observe(frame, prepared=True)
    frame[:] = 0
    assert number_of(session.request().question.frames["policy", 0, 0]) == 7


def test_history_lists_earlier_subtasks_without_the_running_one():
    session = session_of(memory_form="text", history_length=2)
    shown = []
    for t, subtask in enumerate("aabbcbd"):
        run_to(session, t)
        shown.append(session.request().question.history)
        session.apply(answer(subtask=subtask))
    assert shown == [(), (), (), ("a",), ("a",), ("a", "b"), ("b", "c")]


def test_memory_sources_change_the_memory_and_nothing_else():
    shown = {}
    for source in ("predicted", "gt", "none", "shuffled"):
        session = session_of(memory_source=source, keyframes=(52, 90))
        for t in range(0, 201, 5):
            run_to(session, t)
            question = session.request().question
            for key, frame in question.frames.items():
                assert number_of(frame) == key[2]
            assert [key[2] for key in question.recent_keys] == list(range(max(0, t - 35), t + 1, 5))
            session.apply(answer(*([3] if t in (60, 120, 180) else [])))
        shown[source] = [key[2] for key in question.memory_keys]
    assert shown["predicted"] == [35, 95, 155]
    assert shown["gt"] == [50, 90]
    assert shown["none"] == []
    assert len(shown["shuffled"]) == 3
    assert all(step < 165 for step in shown["shuffled"])


def test_shuffled_memory_depends_on_the_seed_only():
    def shown(seed: int) -> list[int]:
        session = session_of(memory_source="shuffled", seed=seed)
        for t in range(0, 601, 5):
            run_to(session, t)
            question = session.request().question
            session.apply(answer(*([3] if t % 60 == 0 else [])))
        return [key[2] for key in question.memory_keys]

    assert shown(1) == shown(1)
    assert shown(1) != shown(2)


def test_state_continues_after_a_restart():
    contract = small_contract(memory_form="image_text")
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (60, 12, 8, 3), dtype=np.uint8)

    def play(session: PlannerSession, steps: range) -> list[dict[str, object]]:
        planner = PicturePlanner(parse_failures=True)
        rows = []
        for t in steps:
            session.observe(frames[t], prepared=True)
            rows.append(plan_step(planner, [session])[0].to_dict())
        return rows

    whole = PlannerSession(contract, instruction="x", memory_source="shuffled")
    expected = play(whole, range(60))
    first = PlannerSession(contract, instruction="x", memory_source="shuffled")
    rows = play(first, range(25))
    second = PlannerSession(contract, memory_source="shuffled")
    second.load_state_dict(first.state_dict())
    assert rows + play(second, range(25, 60)) == expected
    other = PlannerSession(replace(contract, memory_form="image"), instruction="x")
    with pytest.raises(MemerError, match="memory_form"):
        other.load_state_dict(first.state_dict())


def test_interleaved_sessions_share_nothing():
    """C16: no prompt of one session holds a picture of another, and answers equal those of each alone."""
    contract = small_contract()
    rng = np.random.default_rng(0)
    frames = {name: rng.integers(0, 256, (40, 12, 8, 3), dtype=np.uint8) for name in "AB"}

    def sessions() -> dict[str, PlannerSession]:
        return {n: PlannerSession(contract, name=n, source=n, instruction="x") for n in "AB"}

    together, planner = sessions(), PicturePlanner()
    rows: dict[str, list[dict[str, object]]] = {"A": [], "B": []}
    for t in range(40):
        for name, session in together.items():
            session.observe(frames[name][t], prepared=True)
        for name, record in zip(together, plan_step(planner, list(together.values())), strict=True):
            rows[name].append(record.to_dict())
    for name in "AB":
        own = {frame.tobytes() for frame in frames[name]}
        for request in planner.questions[name]:
            assert {frame.tobytes() for frame in request.question.frames.values()} <= own
        alone = sessions()[name]
        expected = []
        for t in range(40):
            alone.observe(frames[name][t], prepared=True)
            expected.append(plan_step(PicturePlanner(), [alone])[0].to_dict())
        assert rows[name] == expected


def test_retries_ask_only_the_failed_ones_again():
    class FailsOnce(PicturePlanner):
        def _answer(self, request):
            super()._answer(request)
            asked = len(self.questions[request.session])
            if request.session == "B" and asked == 1:
                return PlannerResult(status="parse_error", error="x")
            return PlannerResult(status="ok", subtask=f"{request.session}{asked}")

    contract = small_contract()
    sessions = [PlannerSession(contract, name=n, source=n, instruction="x") for n in "AB"]
    for session in sessions:
        session.observe(np.zeros((12, 8, 3), np.uint8), prepared=True)
    planner = FailsOnce()
    records = plan_step(planner, sessions, retries=1)
    assert planner.calls == [2, 1]
    assert [record.current_subtask for record in records] == ["A1", "B2"]
