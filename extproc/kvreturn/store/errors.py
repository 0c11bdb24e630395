"""How a session store fails."""


class StoreError(Exception):
    """A store call failed. Its text is safe to log: it holds no address, credential or key.

    Attributes:
        kind: one word for metrics and log.
        down: whether the store as a whole seems to be away, so that the next call had better not be tried.
    """

    def __init__(self, kind: str, *, down: bool = False) -> None:
        super().__init__(kind)
        self.kind = kind
        self.down = down
