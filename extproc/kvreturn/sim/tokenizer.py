"""Text to token ids and back, for the simulated model.

Ids are laid out as

    0..255        bytes: the fallback for everything that is not a letter, and all of punctuation, digits, newlines
    256..287      special tokens, which no text encodes to
    288..         the known words, four spellings each (` word`, `word`, ` Word`, `Word`)
    then          chunks of one to three letters, without and with a leading space, for unknown words

Text is cut into runs of letters (with at most one space in front) and single other characters, so pieces never merge
across anything but letters.
"""

import re
from enum import IntEnum
from itertools import chain
from typing import Literal

from kvreturn.sim.words import WORDS

Kind = Literal["exact", "blurry"]


class Special(IntEnum):
    """Special tokens."""

    IM_START = 256
    IM_END = 257
    THINK = 258
    END_THINK = 259
    TOOL_CALL = 260
    END_TOOL_CALL = 261
    IMAGE = 262


_SPECIAL_TEXTS: dict[int, bytes] = {
    Special.IM_START: b"<|im_start|>",
    Special.IM_END: b"<|im_end|>",
    Special.THINK: b"<think>",
    Special.END_THINK: b"</think>",
    Special.TOOL_CALL: b"<tool_call>",
    Special.END_TOOL_CALL: b"</tool_call>",
    Special.IMAGE: b"<|image_pad|>",
}

EOS = Special.IM_END
# As in real models, the markers of thinking and of tool calls are visible in raw text; parsers look for them.
_HIDDEN = frozenset({Special.IM_START, Special.IM_END, Special.IMAGE})

_FIRST_WORD = 288
_SPELLINGS = tuple(spelling for word in WORDS for spelling in (f" {word}", word, f" {word.title()}", word.title()))
_FIRST_CHUNK = _FIRST_WORD + len(_SPELLINGS)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BASE = len(_LETTERS)
_CHUNK = 3
_LENGTH_STARTS = (0, 0, _BASE, _BASE + _BASE**2)  # by length: where chunks of that many letters begin
_CHUNKS = _BASE + _BASE**2 + _BASE**3
VOCAB_SIZE = _FIRST_CHUNK + 2 * _CHUNKS

_PIECE = re.compile(r" ?[A-Za-z]+|[^A-Za-z]")
_LETTER_VALUE = {letter: value for value, letter in enumerate(_LETTERS)}
_CACHE_LIMIT = 200_000  # pieces; user text is unbounded
_SPLIT_LENGTHS = range(4, 2 * _CHUNK + 1)  # a word of so many letters is two chunks


def _chunk_id(letters: str, *, space: bool) -> int:
    number = 0
    for letter in letters:
        number = number * _BASE + _LETTER_VALUE[letter]
    return _FIRST_CHUNK + space * _CHUNKS + _LENGTH_STARTS[len(letters)] + number


def _chunk_text(token: int) -> str:
    space, number = divmod(token - _FIRST_CHUNK, _CHUNKS)
    length = next(n for n in (3, 2, 1) if number >= _LENGTH_STARTS[n])
    number -= _LENGTH_STARTS[length]
    letters = ""
    for _ in range(length):
        number, value = divmod(number, _BASE)
        letters = _LETTERS[value] + letters
    return " " * space + letters


def _spell(piece: str) -> tuple[int, ...]:
    """The ids of one piece that is no known word."""
    if not piece[-1].isalpha() or not piece.isascii():
        return tuple(piece.encode("utf-8", "surrogatepass"))
    space, letters = piece[0] == " ", piece.lstrip(" ")
    cuts = range(0, len(letters), _CHUNK)
    return tuple(_chunk_id(letters[i : i + _CHUNK], space=space and i == 0) for i in cuts)


class _Pieces(dict[str, tuple[int, ...]]):
    """Ids by piece of text, filled on demand."""

    def __missing__(self, piece: str) -> tuple[int, ...]:
        if len(self) > _CACHE_LIMIT:
            self.clear()
        ids = self[piece] = (_WORD_IDS[piece],) if piece in _WORD_IDS else _spell(piece)
        return ids


class _Texts(dict[int, bytes]):
    """UTF-8 text by token id, filled on demand."""

    def __missing__(self, token: int) -> bytes:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token id {token} is out of vocabulary (0..{VOCAB_SIZE - 1})")
        text = self[token] = _SPECIAL_TEXTS.get(token, b"") if token < _FIRST_WORD else _chunk_text(token).encode()
        return text


_WORD_IDS = {spelling: _FIRST_WORD + i for i, spelling in enumerate(_SPELLINGS)}
_PIECES = _Pieces()
_TEXTS = _Texts({i: bytes([i]) for i in range(256)})
_TEXTS.update({token: spelling.encode() for spelling, token in _WORD_IDS.items()})


def encode(text: str) -> list[int]:
    """Token ids of `text`; never a special token, whatever the text says."""
    return list(chain.from_iterable(map(_PIECES.__getitem__, _PIECE.findall(text))))


def token_bytes(token: int) -> bytes:
    """UTF-8 bytes of one token (maybe a part of a character).

    Raises:
        ValueError: no such token.
    """
    return _TEXTS[token]


def is_hidden(token: int) -> bool:
    """Whether output text leaves the token out (vLLM's `skip_special_tokens`)."""
    return token in _HIDDEN


def decode(tokens: list[int], *, skip_special: bool = False) -> str:
    """Text of `tokens`; bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: no such token.
    """
    shown = (t for t in tokens if t not in _HIDDEN) if skip_special else tokens
    return b"".join(map(_TEXTS.__getitem__, shown)).decode("utf-8", "replace")


def split_word(token: int) -> tuple[int, int] | None:
    """Two tokens that together spell a word which encodes to the one token `token`.

    This is what makes a `blurry` model: its text does not encode back to the tokens it generated.

    Returns:
        The two ids, or None if the word is too short or too long for two chunks.
    """
    text = decode([token])
    letters = text.lstrip(" ")
    if len(letters) not in _SPLIT_LENGTHS:
        return None
    return _chunk_id(letters[:_CHUNK], space=text != letters), _chunk_id(letters[_CHUNK:], space=False)
