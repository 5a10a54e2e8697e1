"""How many retries there may be, so that an outage is not amplified."""

MOST_SAVED = 100  # retries; a quiet day does not save up for a storm


class RetryBudget:
    """A budget of retries, to which each request adds a part of one. Retries never exceed ``reserve`` + ``ratio`` times
    the requests.

    Args:
        ratio: how many retries each request adds.
        reserve: how many retries there are at the start.
    """

    def __init__(self, ratio: float, reserve: int) -> None:
        self.ratio = ratio
        self._left = float(min(reserve, MOST_SAVED))

    def add_request(self) -> None:
        self._left = min(self._left + self.ratio, MOST_SAVED)

    def take(self) -> bool:
        """Whether there may be one more retry, which is then counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
