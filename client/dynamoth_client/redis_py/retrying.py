"""redis-py's ``Retry`` for what this client asks servers for, apart from publishing and subscribing."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import redis.asyncio.retry
import redis.exceptions
import redis.retry

_T = TypeVar("_T")


def is_retry(value: object) -> bool:
    """Tell whether a value is a ``Retry`` of redis-py, of either kind."""
    return isinstance(value, (redis.retry.Retry, redis.asyncio.retry.Retry))


class Retrying:
    """Tries again as a ``Retry`` of redis-py says: after which errors, how often, and when."""

    def __init__(self, retry: Any) -> None:
        """Read a ``Retry``, of either kind."""
        self.backoff = retry._backoff
        self._retries: int = retry._retries
        self._supported_errors: tuple[type[Exception], ...] = retry._supported_errors

    def longest_s(self, attempt_s: float, bound_s: float) -> float:
        """Return how long redis-py tries at most, if attempts take ``attempt_s`` each; ``bound_s`` where it is more.

        A pause that is drawn at random counts as the backoff's cap. Raises what a backoff of the application's raises.
        """
        if self._retries < 0:  # without a limit
            return bound_s
        backoff = copy.deepcopy(self.backoff)
        backoff.reset()
        cap_s: float | None = getattr(backoff, "_cap", None)
        longest_s = (self._retries + 1) * attempt_s
        for failures in range(1, self._retries + 1):
            if longest_s >= bound_s:
                break
            longest_s += max(0.0, backoff.compute(failures) if cap_s is None else cap_s)
        return min(longest_s, bound_s)

    async def call(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the outcome of the first attempt that succeeds; raise what the last one raised.

        Refused credentials are raised at once: redis-py tries them again, but another attempt cannot help.
        """
        retry = redis.asyncio.retry.Retry(
            copy.deepcopy(self.backoff), self._retries, cast("Any", self._supported_errors)
        )

        async def guarded() -> _T | redis.exceptions.AuthenticationError:
            try:
                return await attempt()
            except redis.exceptions.AuthenticationError as error:
                return error

        outcome = await retry.call_with_retry(guarded, _failed)
        if isinstance(outcome, redis.exceptions.AuthenticationError):
            raise outcome
        return outcome


async def _failed(error: Exception) -> None:
    """Do nothing: a failed attempt leaves nothing to clean up."""
