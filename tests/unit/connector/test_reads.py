"""What P does with a handle, from a request's arrival to its end: each question to D is asked once, and answered."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvreturn_connector import wire
from kvreturn_connector.counts import COUNTERS, REASONS, ReadCounts
from kvreturn_connector.prompts import Prompts
from kvreturn_connector.reads import Reads
from kvreturn_connector.settings import Settings
from kvreturn_connector.sidechannel import Asker

from unit.connector.test_handles import TOKENS, handle

COLD = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
PROMPT = [*TOKENS, 7, 7]  # D's 100 tokens, and two more


@dataclass
class Peer:
    """In place of the side channel: notes what D is asked; `claims` is its answer, None for none yet."""

    claims: str | None = ""
    asked: list[tuple[str, tuple[str, int], str]] = field(default_factory=list)

    def claim(self, address: tuple[str, int], request_id: str, mark: bytes) -> "Future[str]":
        assert len(mark) == 16
        return self._answer("claim", address, request_id)

    def release(self, address: tuple[str, int], request_id: str, mark: bytes) -> "Future[str]":
        assert len(mark) == 16
        return self._answer("release", address, request_id)

    def _answer(self, verb: str, address: tuple[str, int], request_id: str) -> "Future[str]":
        self.asked.append((verb, address, request_id))
        future: Future[str] = Future()
        if self.claims is not None:
            future.set_result(self.claims)
        return future


CLAIM, RELEASE = (("claim", ("10.0.0.1", 5600), "r"), ("release", ("10.0.0.1", 5600), "r"))


def prefill(peer: Peer, **settings: Any) -> Reads:  # noqa: ANN401 - settings of several types
    given = Settings(**{"bidirectional": True, **settings})
    return Reads(given, Prompts(b"", 16), cast("Asker", peer), lambda _, __: None)


def request(tokens: list[int] | None = PROMPT, params: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - vLLM's
    return SimpleNamespace(
        request_id="p",
        prompt_token_ids=tokens,
        prompt_embeds=None,
        num_prompt_tokens=len(tokens or ()),
        kv_transfer_params=params,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
    )


def arrive(reads: Reads, tokens: list[int] | None = PROMPT, **member: Any) -> Any:  # noqa: ANN401 - a request
    asked = request(tokens)
    asked.kv_transfer_params = reads.admit(asked, {**COLD, "kvreturn": {"v": 1, **member}})
    return asked


def told(reads: Reads, asked: Any) -> tuple[int, int, int, str | None]:  # noqa: ANN401 - a request
    done = reads.finish(asked)
    assert done
    return done[0].proven, done[0].read, done[0].local, done[0].reason


def test_a_proven_handle_is_claimed_and_read() -> None:
    peer = Peer()
    reads = prefill(peer)
    asked = arrive(reads, handle=handle())
    assert "kvreturn" not in asked.kv_transfer_params
    assert asked.kv_transfer_params["remote_block_ids"] is None
    assert reads.matched(asked, 0) == (100, True)
    assert asked.kv_transfer_params["remote_block_ids"] == [[3, 1, 4, 15, 9, 2, 6]]
    asked.kv_transfer_params["_remote_blocks_processed"] = True
    assert peer.asked == [CLAIM]
    assert told(reads, asked) == (100, 100, 0, None)
    assert peer.asked == [CLAIM]
    assert reads.finish(asked) is None


def test_the_request_waits_until_d_has_answered() -> None:
    peer = Peer(claims=None)
    reads = prefill(peer)
    asked = arrive(reads, handle=handle())
    assert reads.matched(asked, 0) == (None, False)
    assert reads.matched(asked, 0) == (None, False)
    assert peer.asked == [CLAIM]
    # The client leaves meanwhile: D need not wait any longer.
    reads.finish(asked)
    assert peer.asked == [CLAIM, RELEASE]


@pytest.mark.parametrize(
    ("computed", "tokens", "expected", "questions"),
    [
        (0, [0, *TOKENS], (0, 0, 0, "not_a_continuation"), [RELEASE]),
        (96, PROMPT, (100, 0, 96, "below_threshold"), [RELEASE]),
        (100, PROMPT, (100, 0, 100, "local_hit"), [RELEASE]),
        (32, TOKENS[:40], (32, 0, 32, "local_hit"), [RELEASE]),
        (0, None, (0, 0, 0, "malformed"), [RELEASE]),
    ],
    ids=["another", "little to read", "all here", "shorter, all here", "embeddings"],
)
def test_what_is_not_read_is_given_back(
    computed: int, tokens: list[int] | None, expected: tuple[int, int, int, str], questions: list[Any]
) -> None:
    peer = Peer()
    reads = prefill(peer)
    asked = arrive(reads, tokens, handle=handle())
    assert reads.matched(asked, computed) == (0, False)
    assert peer.asked == questions
    assert told(reads, asked) == expected
    assert peer.asked == questions


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({"bidirectional": False}, {}, "disabled"),
        ({}, {"kvreturn": wire.dump_proof(wire.Proof(50, b"12345678", b"x" * 16, (), 480.0))}, "malformed"),
        ({}, {"remote_host": "8.8.8.8"}, "peer"),
        ({"secret": b"s"}, {}, "mac"),
    ],
)
def test_nobody_is_asked_for_a_handle_that_cannot_be_trusted(
    settings: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    peer = Peer()
    reads = prefill(peer, **settings)
    asked = arrive(reads, handle=handle(**changes))
    assert reads.matched(asked, 0) == (0, False)
    assert told(reads, asked)[3] == reason
    assert peer.asked == ([RELEASE] if reason == "disabled" else [])


@pytest.mark.parametrize("answer", ["used", "expired", "node_gone"])
def test_what_d_does_not_hold_is_computed(answer: str) -> None:
    peer = Peer(claims=answer)
    reads = prefill(peer)
    asked = arrive(reads, handle=handle())
    assert reads.matched(asked, 0) == (0, False)
    reads.allocated(asked, 0)
    assert asked.kv_transfer_params["remote_block_ids"] is None
    assert told(reads, asked) == (100, 0, 0, answer)
    assert peer.asked == [CLAIM]


def test_a_load_that_failed_is_not_tried_again() -> None:
    reads = prefill(Peer())
    asked = arrive(reads, handle=handle())
    assert reads.matched(asked, 0) == (100, True)
    asked.kv_transfer_params["_remote_blocks_processed"] = True
    reads.failed("p")
    assert reads.matched(asked, 0) == (0, False)
    assert told(reads, asked) == (100, 0, 0, "read_failed")


@pytest.mark.parametrize(("member", "kept"), [({}, True), ({"keep": True}, True), ({"keep": False}, False)])
@pytest.mark.parametrize("given", [{}, {"handle": handle()}], ids=["cold", "with a handle"])
def test_blocks_are_kept_unless_nobody_will_come(member: dict[str, Any], given: dict[str, Any], *, kept: bool) -> None:
    reads = prefill(Peer())
    asked = arrive(reads, **given, **member)
    assert reads.matched(asked, 0) == ((100, True) if given else (0, False))
    done = reads.finish(asked)
    assert done
    assert done[1] is kept


@pytest.mark.parametrize(("answer", "reason"), [("", "freed"), ("used", "used"), ("node_gone", "node_gone")])
def test_a_request_that_frees_tells_what_came_of_it(answer: str, reason: str) -> None:
    peer = Peer(claims=answer)
    reads = prefill(peer, bidirectional=False)
    asked = request([1])
    asked.kv_transfer_params = reads.free(asked, handle())
    assert asked.kv_transfer_params == {}
    assert peer.asked == [RELEASE]
    assert reads.matched(asked, 0) == (0, False)
    done = reads.finish(asked)
    assert done
    assert (done[0].reason, done[1]) == (reason, False)


def test_a_request_that_frees_waits_for_the_answer() -> None:
    reads = prefill(Peer(claims=None))
    asked = request([1])
    asked.kv_transfer_params = reads.free(asked, handle())
    assert reads.matched(asked, 0) == (None, False)


def test_only_a_whole_handle_can_be_freed() -> None:
    peer = Peer()
    reads = prefill(peer)
    asked = request([1])
    asked.kv_transfer_params = reads.free(asked, handle(remote_port=0))
    assert reads.matched(asked, 0) == (0, False)
    assert told(reads, asked) == (0, 0, 0, "malformed")
    assert peer.asked == []


def test_what_became_of_handles_is_counted() -> None:
    """Requests without a handle, and those that only free one, are none of it."""
    reads = prefill(Peer())
    given: list[dict[str, Any]] = [{}, {"handle": handle()}]
    for member in given:
        asked = arrive(reads, **member)
        reads.matched(asked, 32)
        asked.kv_transfer_params["_remote_blocks_processed"] = True
        reads.finish(asked)
    for tokens, computed in (([0, *TOKENS], 0), (PROMPT, 100), (None, 0)):
        asked = arrive(reads, tokens, handle=handle())
        reads.matched(asked, computed)
        reads.finish(asked)
    freeing = request([1])
    freeing.kv_transfer_params = reads.free(freeing, handle())
    reads.finish(freeing)
    assert reads.counts.totals == {
        "kvreturn_handles": 4,
        "kvreturn_proofs": 2,
        "kvreturn_proven_tokens": 200,
        "kvreturn_reads": 1,
        "kvreturn_read_tokens": 68,
    }
    assert reads.counts.unread == {"not_a_continuation": 1, "local_hit": 1, "refused": 1}


def test_the_counters_have_the_names_that_are_declared() -> None:
    counts = ReadCounts()
    counts.add(0, 0, "something new")
    assert counts.totals.keys() <= COUNTERS.keys()
    assert counts.unread.keys() <= set(REASONS)


@pytest.mark.parametrize("asks", [True, False])
def test_who_asks_what_runs_here_is_told_and_nobody_else_is(*, asks: bool) -> None:
    peer, warned = Peer(), list[str]()
    reads = Reads(
        Settings(bidirectional=True),
        Prompts(b"", 16),
        cast("Asker", peer),
        lambda key, _: warned.append(key),
        lambda: {"connector": "1.2.3"},
    )
    asked = request([1])
    asked.kv_transfer_params = reads.free(asked, {}, about=asks)
    assert reads.matched(asked, 0) == (0, False)
    done = reads.finish(asked)
    assert done
    told = wire.dump_report(done[0])
    assert (told["reason"], told.get("about")) == ("malformed", {"connector": "1.2.3"} if asks else None)
    assert (peer.asked, warned) == ([], [])
    assert wire.load_report(told).about == told.get("about")
