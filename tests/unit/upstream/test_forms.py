"""What is known of a prefill node holds for as long as its engine lives."""

from kvreturn.core.returning import Form
from kvreturn.upstream.forms import Forms

P = "10.0.0.1:8000"


def test_nothing_is_known_of_a_node_that_nobody_asked() -> None:
    assert Forms().form(P) is None


def test_a_node_with_our_connector_says_so_in_every_answer() -> None:
    forms = Forms()
    forms.saw(P, "e1", proves=True)
    assert forms.form(P) is Form.SEALED


def test_a_probe_holds_until_the_engine_is_another_one() -> None:
    forms = Forms()
    forms.saw(P, "e1", proves=False)
    assert forms.form(P) is None
    forms.probed(P, Form.STREAMED)
    forms.saw(P, "e1", proves=False)
    assert forms.form(P) is Form.STREAMED
    forms.saw(P, "e2", proves=False)
    assert forms.form(P) is None


def test_a_node_that_lost_our_connector_is_probed() -> None:
    forms = Forms()
    forms.saw(P, "e1", proves=True)
    forms.saw(P, "e1", proves=False)
    assert forms.form(P) is None


def test_a_node_that_got_our_connector_needs_no_probe() -> None:
    forms = Forms()
    forms.probed(P, Form.LOADED)
    forms.saw(P, "e2", proves=True)
    assert forms.form(P) is Form.SEALED
