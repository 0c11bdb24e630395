"""An Envoy that has no scripts, before a router that could do with them."""

from kvreturn.core.ports import Refuse
from kvreturn.server.exchange import Exchange
from kvreturn.server.messages import Headers

_NO_SCRIPT = (
    "envoy.lane is `fast`, but Envoy has no scripts for it: requests and streamed answers pass through ext_proc. Make "
    "Envoy's bootstrap again with `kvreturn envoy-config` and start it with that, or set envoy.lane: portable"
)


class ScriptlessExchange(Exchange):
    """An exchange by ext_proc where a script ought to have told of it: says so, where its answer is streamed."""

    def _response_begins(self, headers: dict[str, str], upstream: str | None) -> Headers | Refuse:
        streamed = headers.get("content-type", "").lower().startswith("text/event-stream")
        if self._record and streamed and "transfer-encoding" in headers:
            self._world.warn_once(_NO_SCRIPT)
        return super()._response_begins(headers, upstream)
