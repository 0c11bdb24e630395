"""Who is asked for token ids in a turn, and who gets them."""

from dataclasses import dataclass

from kvreturn.core.api.base import Prompt
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.policy import Policy


@dataclass(frozen=True, slots=True)
class IdPlan:
    """What is asked and told.

    Attributes:
        of_prefill: P is asked for those of the prompt (vLLM's `return_token_ids`).
        of_connector: our connector on P is, since vLLM's answers of this API do not have them.
        in_answer: D's answer has all of them: a stock D puts none into its handle.
        of_decode: because it is asked for them here, so that the client must not get them.
        to_decode: D gets those of the prompt, so that it need not tokenize, and means the same prompt.
    """

    of_prefill: bool = False
    of_connector: bool = False
    in_answer: bool = False
    of_decode: bool = False
    to_decode: bool = False


def plan_ids(prompt: Prompt, policy: Policy, body: ObjectText) -> IdPlan:
    """The plan for a request.

    Args:
        prompt: the request's.
        policy: of its model.
        body: the client's body.
    """
    to_decode = policy.pass_token_ids and prompt.passes_ids
    returns = policy.returns != "lazy" and prompt.choices == 1
    asked = "return_token_ids" in body
    # A stock D's streams bring no handle (vLLM 0.32.0). And with ids, its completions leave out what `echo` asks for.
    touchable = not (prompt.stream or "echo" in body) and policy.proof in {"off", "trusted"}
    in_answer = returns and prompt.identifiable and touchable and (not asked or body.load("return_token_ids") is True)
    return IdPlan(
        of_prefill=to_decode or (returns and prompt.identifiable),
        of_connector=returns and not prompt.identifiable and policy.proof == "connector",
        in_answer=in_answer,
        of_decode=in_answer and not asked,
        to_decode=to_decode,
    )
