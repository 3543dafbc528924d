"""Makes up the users of a broker from what its reports say of all of them together.

A recording has no list of users: reports give, for each busy interest, how many users have it (n_jk), and how many
users have a load in each class. Users are made so that both hold, as far as possible. Which interests go together is
not recorded, so it is taken to be what the classes of loads suggest: heavy users have many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

USERS_MAX = 2000
"""Most users that are made of a broker: of more, each stands for several, and one of them is offered."""


def own_loads(user_loads: Sequence[int], count: int) -> list[float]:
    """Return the loads u_i of ``count`` users in bytes/s, the heaviest first, spread as in the classes of a report.

    Without classes, all are 0.
    """
    total = sum(user_loads)
    loads: list[float] = []
    before = 0
    for number in range(len(user_loads) - 1, -1, -1):
        before += user_loads[number]
        middle = 1.5 * 2 ** (number - 1) if number else 0.0
        loads += [middle] * (round(before / total * count) - len(loads) if total else 0)
    return loads + [0.0] * (count - len(loads))


def make_users(
    count: int, user_loads: Sequence[int], held: Mapping[str, float], rates: Mapping[str, float]
) -> list[tuple[str, ...]]:
    """Return the interests of ``count`` users.

    Each interest goes to the users who lack most of their load, the interest with the highest rate first.

    Args:
        count: of users.
        user_loads: how many users have a load in each class, as in a report.
        held: how many of these users have each interest; fractions are rounded so that the sum is right.
        rates: in bytes/s, by interest.

    """
    interests: list[list[str]] = [[] for _ in range(count)]
    lacking = [(-load, number) for number, load in enumerate(own_loads(user_loads, count))]
    heapify(lacking)
    rounded = 0.0
    for interest in sorted(held, key=lambda each: (-rates.get(each, 0.0), each)):
        exact = rounded + held[interest]
        holders = min(count, max(0, int(exact + 1e-9)))
        rounded = max(0.0, min(1.0, exact - holders))
        rate = rates.get(interest, 0.0)
        taken = [heappop(lacking) for _ in range(holders)]
        for load, number in taken:
            interests[number].append(interest)
            heappush(lacking, (load + rate, number))
    return [tuple(each) for each in interests]
