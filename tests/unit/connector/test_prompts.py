"""What a finished request holds, as it is told to the prefill node."""

from types import SimpleNamespace

import pytest
from kvreturn_connector.prompts import Prompts


@pytest.mark.parametrize(
    ("computed", "placeholders", "tokens", "held", "blocks"),
    [
        (95, 0, 96, 95, [5, 6, 7]),  # the last token is sampled, its KV not computed
        (96, 1, 96, 95, [5, 6, 7]),  # asynchronous scheduling: its step runs at this moment
        (97, 1, 97, 96, [5, 6, 7]),  # as before, and with it the only token of the fourth block
        (99, 0, 97, 97, [5, 6, 7, 8]),  # speculative decoding: two more were accepted behind the end of the answer
        (64, 0, 65, 64, [5, 6]),
    ],
)
def test_only_what_is_written_and_kept_is_held(
    computed: int, placeholders: int, tokens: int, held: int, blocks: list[int]
) -> None:
    request = SimpleNamespace(num_computed_tokens=computed, num_output_placeholders=placeholders, num_tokens=tokens)
    assert Prompts(b"", 32).held(request, [5, 6, 7, 8]) == (held, blocks)
