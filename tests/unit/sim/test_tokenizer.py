import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.sim.tokenizer import VOCAB_SIZE, Special, decode, encode, split_word

SPECIALS = {int(token) for token in Special}


@given(st.text())
def test_any_text_round_trips_and_gives_no_special_token(text: str) -> None:
    tokens = encode(text)
    assert decode(tokens) == text
    assert not SPECIALS & set(tokens)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_every_token_has_a_text(tokens: list[int]) -> None:
    assert isinstance(decode(tokens), str)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the file", 2),  # known words, the second with its space
        ("The File", 2),
        (" xyzzy", 2),  # unknown: chunks of three letters
        ("x = 10\n", 7),  # x, ' ', '=', ' ', '1', '0', '\\n': a space in front of no letter stands alone
        ("    pass", 5),
        ("é", 2),  # UTF-8 bytes
        ("🌍", 4),
        ("<|im_start|>", 7),  # < | im _ start | >
        ("", 0),
    ],
)
def test_pieces(text: str, count: int) -> None:
    assert len(encode(text)) == count


def test_text_of_special_tokens_is_ordinary_text() -> None:
    for token in Special:
        text = decode([token])
        assert text[0] + text[-1] == "<>"
        assert len(encode(text)) > 2


def test_hidden_tokens_are_left_out_of_answers_but_markers_are_not() -> None:
    tokens = [Special.IM_START, *encode("a"), Special.TOOL_CALL, Special.IM_END]
    assert decode([*map(int, tokens)], skip_special=True) == "a<tool_call>"


def test_a_split_word_reads_the_same_and_encodes_to_one_other_token() -> None:
    (word,) = encode(" parser")
    parts = split_word(word)
    assert parts is not None
    assert decode(list(parts)) == " parser"
    assert word not in parts
    assert split_word(encode(" the")[0]) is None
    assert split_word(encode(" division")[0]) is None


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert decode([0xF0, 0x9F]) == "\ufffd"
    assert decode([*encode("a"), 0xC3]) == "a\ufffd"


def test_unknown_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="out of vocabulary"):
        decode([VOCAB_SIZE])
