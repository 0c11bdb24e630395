"""Token ids that were asked for on our own behalf do not reach the client. Shapes as vLLM 0.32.0 writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.ids import take_ids

CHAT = (
    b'{"id":"c","choices":[{"index":0,"message":{"content":"a \\"token_ids\\":[9]"},"finish_reason":"stop",'
    b'"token_ids":%s}],"usage":{"prompt_tokens":3},"prompt_token_ids":%s}'
)
TEXT = b'{"id":"c","choices": [ {"index":0,"text":"a","token_ids":%s,"prompt_token_ids":%s} ],"usage":null}'


@pytest.mark.parametrize("shape", [CHAT, TEXT], ids=["chat", "completions"])
def test_the_body_is_as_it_would_be_without_them(shape: bytes) -> None:
    text, ids = take_ids(shape % (b"[4, 5]", b"[1,2,3]"))
    assert text.replace(b" ", b"") == (shape % (b"null", b"null")).replace(b" ", b"")
    assert ids == (b"[1,2,3]", [4, 5])


@pytest.mark.parametrize("shape", [CHAT, TEXT], ids=["chat", "completions"])
@pytest.mark.parametrize(("generated", "prompt"), [(b"null", b"[1]"), (b"[4]", b"null"), (b"null", b"null")])
def test_half_of_them_are_none(shape: bytes, generated: bytes, prompt: bytes) -> None:
    text, ids = take_ids(shape % (generated, prompt))
    assert ids is None
    assert b"[1]" not in text
    assert b"[4]" not in text


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"no"}}',
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"choices":[{"token_ids":[1]},{"token_ids":[2]}]}',
    ],
)
def test_what_has_not_one_choice_brings_none(body: bytes) -> None:
    assert take_ids(body) == (body, None)


@given(st.lists(st.integers(0, 2**32 - 2)), st.lists(st.integers(0, 2**32 - 2)))
def test_any_ids(prompt: list[int], generated: list[int]) -> None:
    text, ids = take_ids(CHAT % (str(generated).encode(), str(prompt).encode()))
    assert text == CHAT % (b"null", b"null")
    assert ids == (str(prompt).encode(), generated)
