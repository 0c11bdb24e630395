"""`return: auto`: every rule by a table, the order of the rules, hysteresis, trials, and what is learned."""

from dataclasses import replace

import pytest

from kvreturn.core.choice import Choice, Chooser, Fate, HabitView, Moment, NodeView, Pressure, View

P, Q, D, E = "10.0.0.1:8100", "10.0.0.2:8100", "10.0.1.1:8200", "10.0.1.2:8200"
LOST: Fate = "evicted"
KEPT: Fate = "used"
NOBODY: Fate = "unused"
CALM = Pressure(kv_usage=0.3, waiting=0, running=2, pinned=0.05)
CHAT = Moment("stop", tokens=5_000, gap=120.0, turns=2, prefill=CALM, decode=CALM, decode_node=D)
AGENT = replace(CHAT, finish_reason="tool_calls")


def auto(moment: Moment, *, chooser: Chooser | None = None, now: float = 0.0, node: str = P) -> tuple[bool, str]:
    choice = (chooser or Chooser()).choose("auto", moment, node, now)
    return choice.eager, choice.why


def pressed(kv_usage: float = 0.3, waiting: int = 0, pinned: float | None = 0.05) -> Pressure:
    return Pressure(kv_usage, waiting, 8, pinned)


@pytest.mark.parametrize(("mode", "eager"), [("lazy", False), ("eager", True)])
def test_a_fixed_mode_is_just_that(mode: str, eager: bool) -> None:  # noqa: FBT001 - a column of the table
    full = replace(AGENT, prefill=pressed(1.0, 50), decode=pressed(1.0, 50))
    for moment in (AGENT, full, replace(AGENT, tokens=1)):
        assert Chooser().choose(mode, moment, P, 0.0) == Choice(eager, "fixed")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "gap", "turns", "want"),
    [
        ("tool_calls", None, 1, (True, "tool_calls")),
        ("tool_calls", 200.0, 9, (True, "tool_calls")),
        ("stop", None, 1, (False, "default")),
        ("length", None, 1, (False, "default")),
        ("content_filter", None, 1, (False, "default")),
        (None, None, 1, (False, "default")),
        ("stop", 30.0, 2, (True, "quick_gap")),
        ("stop", 30.1, 2, (False, "default")),
        ("stop", 449.9, 3, (False, "default")),
        ("stop", 450.0, 3, (True, "slow_gap")),
        ("tool_calls", 450.0, 3, (True, "slow_gap")),
        ("stop", 120.0, 3, (False, "default")),
        ("stop", 120.0, 4, (True, "long_lived")),
        ("length", 1.0, 2, (True, "quick_gap")),
    ],
)
def test_calm_nodes_leave_it_to_the_conversation(
    reason: str | None, gap: float | None, turns: int, want: tuple[bool, str]
) -> None:
    for node in (CALM, None):  # nodes that tell nothing are taken to be calm
        assert auto(replace(CHAT, finish_reason=reason, gap=gap, turns=turns, prefill=node, decode=node)) == want


def test_the_gap_is_held_against_the_time_that_d_keeps_these_blocks() -> None:
    assert auto(replace(CHAT, gap=50.0, ttl=50.0)) == (True, "slow_gap")


@pytest.mark.parametrize(
    ("decode", "want"),
    [
        (pressed(0.84), (False, "default")),
        (pressed(0.85), (True, "decode_pressure")),
        (pressed(0.85, pinned=None), (True, "decode_pressure")),
        (pressed(0.69, waiting=9), (False, "default")),  # they wait for compute
        (pressed(0.7, waiting=1, pinned=0.1), (True, "decode_pressure")),
        (pressed(0.7, waiting=1, pinned=0.09), (False, "default")),  # not for want of what is pinned
        (pressed(0.7, waiting=1, pinned=None), (True, "decode_pressure")),
        (pressed(0.5, pinned=0.39), (False, "default")),
        (pressed(0.5, pinned=0.4), (True, "decode_pins")),
        (pressed(0.85, pinned=0.4), (True, "decode_pressure")),
    ],
)
def test_a_decode_node_short_of_blocks_makes_it_eager(decode: Pressure, want: tuple[bool, str]) -> None:
    assert auto(replace(CHAT, decode=decode)) == want


@pytest.mark.parametrize(
    ("prefill", "want"),
    [
        (pressed(0.79), (True, "tool_calls")),
        (pressed(0.8), (False, "prefill_pressure")),
        (pressed(0.1, waiting=3), (True, "tool_calls")),
        (pressed(0.1, waiting=4), (False, "prefill_pressure")),
    ],
)
def test_a_prefill_node_short_of_blocks_or_with_a_queue_makes_it_lazy(
    prefill: Pressure, want: tuple[bool, str]
) -> None:
    assert auto(replace(AGENT, prefill=prefill)) == want


FULL, STARVED, BUSY = pressed(0.9), pressed(0.9, waiting=3, pinned=0.5), pressed(0.9, waiting=9)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"tokens": 63, "decode": STARVED}, (False, "small")),
        ({"tokens": 64, "decode": STARVED}, (True, "decode_pressure")),
        ({"worth_reading": False, "decode": STARVED}, (False, "slow_link")),
        ({"decode": STARVED, "prefill": BUSY}, (True, "decode_pressure")),  # P is full of what waits for D
        ({"decode": FULL, "prefill": BUSY}, (False, "prefill_pressure")),
        ({"decode": FULL}, (True, "decode_pressure")),
        ({"prefill": BUSY, "gap": 900.0}, (False, "prefill_pressure")),
    ],
)
def test_which_rule_goes_before_which(changes: dict[str, object], want: tuple[bool, str]) -> None:
    assert auto(replace(AGENT, **changes)) == want  # type: ignore[arg-type]


def test_pressure_on_d_ends_below_another_threshold_than_it_began() -> None:
    chooser = Chooser()
    story = [
        (0.0, 0.9, True),
        (20.0, 0.75, True),  # below what made it eager, above what ends it
        (40.0, 0.69, False),
        (60.0, 0.84, False),
        (80.0, 0.85, True),
    ]
    for now, kv_usage, eager in story:
        assert auto(replace(CHAT, decode=pressed(kv_usage)), chooser=chooser, now=now)[0] is eager, now


def test_pressure_on_p_ends_below_another_threshold_than_it_began() -> None:
    chooser = Chooser()
    story = [
        (0.0, pressed(0.85), False),
        (20.0, pressed(0.6), False),
        (40.0, pressed(0.59, waiting=2), False),
        (60.0, pressed(0.59, waiting=1), True),
        (80.0, pressed(0.79, waiting=3), True),
    ]
    for now, prefill, eager in story:
        assert auto(replace(AGENT, prefill=prefill), chooser=chooser, now=now)[0] is eager, now


def test_a_change_stays_for_ten_seconds() -> None:
    chooser = Chooser()
    times = [0.0, 2.0, 4.0, 6.0, 8.0, 9.9, 10.0, 12.0, 19.9, 20.0]
    usage = [0.9, 0.1, 0.9, 0.1, 0.9, 0.1, 0.1, 0.9, 0.9, 0.9]
    seen = [
        auto(replace(CHAT, decode=pressed(u)), chooser=chooser, now=t)[0] for t, u in zip(times, usage, strict=True)
    ]
    assert seen == [True] * 6 + [False] * 3 + [True]


def test_a_node_that_tells_nothing_any_more_is_calm_after_the_dwell() -> None:
    chooser = Chooser()
    assert auto(replace(CHAT, decode=FULL), chooser=chooser, now=0.0) == (True, "decode_pressure")
    assert auto(replace(CHAT, decode=None), chooser=chooser, now=5.0) == (True, "decode_pressure")
    assert auto(replace(CHAT, decode=None), chooser=chooser, now=11.0) == (False, "default")


def test_nodes_are_judged_one_by_one() -> None:
    chooser = Chooser()
    assert auto(replace(AGENT, prefill=BUSY), chooser=chooser) == (False, "prefill_pressure")
    assert auto(AGENT, chooser=chooser, node=Q) == (True, "tool_calls")
    assert auto(replace(CHAT, decode=FULL), chooser=chooser, node=Q) == (True, "decode_pressure")
    assert auto(replace(CHAT, decode_node=E), chooser=chooser, node=Q) == (False, "default")


# --- what became of returns ---


def tell(chooser: Chooser, *fates: Fate, reason: str = "tool_calls", now: float = 0.0, node: str = P) -> None:
    for fate in fates:
        chooser.learned(node, reason, fate, now)


@pytest.mark.parametrize(
    ("fates", "want"),
    [
        ([LOST] * 2, (True, "tool_calls")),
        ([LOST] * 3, (False, "evicted")),
        ([LOST, KEPT, KEPT, KEPT, LOST, KEPT, KEPT, KEPT, KEPT, LOST], (False, "evicted")),
        ([LOST] + [KEPT] * 9 + [LOST] * 2, (True, "tool_calls")),  # the first is the eleventh last
        ([KEPT] * 7 + [NOBODY] * 5 + [LOST] * 2, (True, "tool_calls")),
    ],
)
def test_three_of_the_last_ten_lost_make_it_lazy(fates: list[Fate], want: tuple[bool, str]) -> None:
    chooser = Chooser()
    tell(chooser, *fates)
    assert auto(AGENT, chooser=chooser, now=1.0) == want
    assert auto(AGENT, chooser=chooser, now=1.0, node=Q) == (True, "tool_calls")


def test_what_p_loses_still_frees_a_decode_node_that_needs_it() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    assert auto(replace(AGENT, decode=FULL), chooser=chooser, now=1.0) == (True, "decode_pressure")


def test_one_turn_in_twenty_shows_whether_p_still_loses_them() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    seen = [auto(AGENT, chooser=chooser, now=11.0 + i) for i in range(60)]
    assert seen == ([(False, "evicted")] * 19 + [(True, "exploring")]) * 3


@pytest.mark.parametrize(("kept", "lost"), [(5, 0), (0, 3)])
def test_lazy_turns_tell_of_ps_cache_as_returns_do(kept: int, lost: int) -> None:
    chooser = Chooser()
    if kept:
        tell(chooser, LOST, LOST, LOST)
    for i in range(kept + lost):
        assert auto(AGENT, chooser=chooser, now=20.0)[0] is not bool(kept)
        chooser.noticed(P, kept=i < kept, now=20.0)
    assert auto(AGENT, chooser=chooser, now=20.0)[0] is bool(kept)


def test_pins_that_crowd_each_other_are_no_reason_to_have_p_lose_them() -> None:
    chooser = Chooser()
    tell(chooser, LOST, LOST, LOST)
    assert auto(replace(AGENT, decode=pressed(0.5, pinned=0.45)), chooser=chooser) == (False, "evicted")
    assert auto(replace(AGENT, decode=pressed(0.9, pinned=0.45)), chooser=chooser) == (True, "decode_pressure")


def test_pins_crowd_each_other_until_they_are_a_quarter() -> None:
    chooser = Chooser()
    for now, pinned, eager in [(0.0, 0.45, True), (20.0, 0.25, True), (40.0, 0.24, False), (60.0, 0.39, False)]:
        assert auto(replace(CHAT, decode=pressed(0.5, pinned=pinned)), chooser=chooser, now=now)[0] is eager, now


def test_five_trials_in_a_row_that_were_kept_end_it() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    tell(chooser, *[KEPT] * 4, LOST, *[KEPT] * 4, now=20.0)
    assert auto(AGENT, chooser=chooser, now=21.0) == (False, "evicted")
    tell(chooser, KEPT, now=22.0)
    assert auto(AGENT, chooser=chooser, now=23.0) == (True, "tool_calls")
    tell(chooser, LOST, LOST, now=40.0)
    assert auto(AGENT, chooser=chooser, now=41.0) == (True, "tool_calls")  # it begins anew
    tell(chooser, LOST, now=42.0)
    assert auto(AGENT, chooser=chooser, now=43.0) == (False, "evicted")


def test_trials_that_p_loses_keep_it_lazy_and_ten_minutes_without_any_end_it() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    tell(chooser, LOST, now=500.0)
    assert auto(AGENT, chooser=chooser, now=1_100.0) == (False, "evicted")
    assert auto(AGENT, chooser=chooser, now=1_101.0) == (True, "tool_calls")


@pytest.mark.parametrize(
    ("reason", "fates", "want"),
    [
        ("tool_calls", [NOBODY] * 5, (True, "tool_calls")),  # too few to tell
        ("tool_calls", [NOBODY] * 6, (False, "wasted")),
        ("tool_calls", [NOBODY] * 3 + [KEPT] * 3, (False, "wasted")),
        ("tool_calls", [KEPT] * 3 + [NOBODY] * 2 + [KEPT], (True, "tool_calls")),
        ("stop", [KEPT] * 5, (False, "default")),
        ("stop", [KEPT] * 6, (True, "used")),
        ("stop", [NOBODY] * 2 + [KEPT] * 4, (False, "default")),  # a third unused is neither
        ("stop", [NOBODY] * 2 + [KEPT] * 6, (True, "used")),
        ("stop", [LOST, LOST, *[KEPT] * 4], (True, "used")),  # who came, came
    ],
)
def test_what_became_of_turns_that_ended_so(reason: str, fates: list[Fate], want: tuple[bool, str]) -> None:
    chooser = Chooser()
    tell(chooser, *fates, reason=reason)
    assert auto(replace(CHAT, finish_reason=reason), chooser=chooser, now=1.0) == want


def test_finish_reasons_are_judged_one_by_one_and_for_all_nodes() -> None:
    chooser = Chooser()
    tell(chooser, *[NOBODY] * 6, reason="stop")
    quick = replace(CHAT, gap=1.0)
    assert auto(quick, chooser=chooser, node=Q) == (False, "wasted")
    assert auto(replace(quick, finish_reason="length"), chooser=chooser) == (True, "quick_gap")
    assert auto(AGENT, chooser=chooser) == (True, "tool_calls")
    assert auto(replace(quick, decode=FULL), chooser=chooser) == (True, "decode_pressure")


def test_wasted_turns_are_tried_again_and_return_when_they_are_used() -> None:
    chooser = Chooser()
    tell(chooser, *[NOBODY] * 6)
    assert [auto(AGENT, chooser=chooser, now=11.0) for _ in range(20)] == [(False, "wasted")] * 19 + [
        (True, "exploring")
    ]
    tell(chooser, *[KEPT] * 14, now=20.0)  # 6 of 20 unused
    assert auto(AGENT, chooser=chooser, now=21.0) == (False, "wasted")
    tell(chooser, KEPT, now=22.0)  # the oldest is gone: 5 of 20, a quarter
    assert auto(AGENT, chooser=chooser, now=23.0) == (True, "tool_calls")


def test_fates_older_than_an_hour_do_not_count() -> None:
    chooser = Chooser()
    tell(chooser, *[NOBODY] * 5)
    tell(chooser, NOBODY, now=3_601.0)
    assert auto(AGENT, chooser=chooser, now=3_601.0) == (True, "tool_calls")


def test_a_trial_of_a_habit_is_no_trial_of_a_node_that_loses_returns() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    seen = [auto(CHAT, chooser=chooser, now=11.0) for _ in range(20)]
    assert seen == [(False, "default")] * 19 + [(False, "evicted")]


def test_the_view_tells_what_each_node_does_and_why() -> None:
    chooser = Chooser()
    tell(chooser, *[KEPT] * 4, NOBODY, NOBODY, reason="stop")
    auto(replace(AGENT, prefill=BUSY, decode=FULL), chooser=chooser)
    auto(replace(AGENT, decode=STARVED, decode_node=E), chooser=chooser, node=Q)
    assert chooser.view() == View(
        prefill={
            P: NodeView(Choice(eager=False, why="prefill_pressure"), pressed=True, evicts=False, fates={"used": 4}),
            Q: NodeView(Choice(eager=True, why="decode_pressure"), pressed=False, evicts=False, fates={}),
        },
        decode={D: "full", E: "starved"},
        habits={
            "stop": HabitView(None, {"used": 4, "unused": 2}),
            "length": HabitView(None, {}),
            "tool_calls": HabitView(None, {}),
            "other": HabitView(None, {}),
        },
    )


def test_only_the_latest_nodes_are_remembered() -> None:
    chooser = Chooser()
    tell(chooser, *[LOST] * 3)
    for i in range(255):
        auto(AGENT, chooser=chooser, node=f"10.1.{i}.1:8100")
    assert auto(AGENT, chooser=chooser) == (False, "evicted")  # asked for: the latest again
    for i in range(256):
        auto(AGENT, chooser=chooser, node=f"10.2.{i}.1:8100")
    assert len(chooser.view().prefill) == 256
    assert auto(AGENT, chooser=chooser) == (True, "tool_calls")
