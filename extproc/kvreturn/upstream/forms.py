"""What runs on each prefill node, so that an eager return takes the form that it understands."""

from kvreturn.core.returning import Form


class Forms:
    """By node, for as long as its engine lives.

    A stock node's form is found out by a probe and never guessed: the wrong one hangs it for good.
    """

    def __init__(self) -> None:
        self._engines: dict[str, str] = {}
        self._forms: dict[str, Form] = {}

    def saw(self, node: str, engine: str, *, proves: bool) -> None:
        """The node answered a prefill request.

        Args:
            node: its address.
            engine: its engine id.
            proves: whether our connector runs there: it reports in every answer.
        """
        if self._engines.get(node) != engine:
            self._engines[node] = engine
            self._forms.pop(node, None)
        if proves:
            self._forms[node] = Form.SEALED
        elif self._forms.get(node) is Form.SEALED:
            del self._forms[node]

    def engine(self, node: str) -> str | None:
        """The node's engine id, as far as it is known."""
        return self._engines.get(node)

    def forget(self, node: str) -> None:
        """What is known of the node may not be true any more."""
        self._forms.pop(node, None)

    def form(self, node: str) -> Form | None:
        """What the node understands; None if that is not known yet."""
        return self._forms.get(node)

    def probed(self, node: str, form: Form) -> None:
        """A probe has told."""
        self._forms[node] = form
