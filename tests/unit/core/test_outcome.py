import re

from kvreturn.core.outcome import Outcome


def test_outcomes_are_words_that_fit_into_labels() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", o.value) for o in Outcome)
    assert all(o.value == o.name.lower() for o in Outcome)


def test_the_outcomes_that_the_design_names_are_there() -> None:
    named = (
        "hit partial_hit first_turn no_handle_from_decode expired not_a_continuation unproven already_taken "
        "below_threshold local_hit store_unavailable node_gone breaker_open multiple_choices disabled"
    )
    assert set(named.split()) <= {o.value for o in Outcome}
