"""The policy that the settings give a model's turns."""

from kvreturn.config import Settings
from kvreturn.core.policy import Policy


def policy_for(settings: Settings, model: str) -> Policy:
    """The policy for a model's turns."""
    return Policy(
        proof=settings.proof_for(model),
        min_tokens=settings.limits.min_tokens,
        timeout=settings.prefill.timeout,
        fallback=settings.prefill.on_failure == "fallback",
        ttl=settings.store.ttl,
        pass_token_ids=settings.prefill.pass_token_ids,
        returns=settings.return_for(model),
        secret=settings.secret.get_secret_value().encode(),
        history=settings.limits.history,
        salts=settings.tenant_cache_salt,
    )
