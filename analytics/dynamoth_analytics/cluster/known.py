"""Which queries a data cluster has found in the catalog: one that is gone without being dropped was lost."""

from __future__ import annotations

from dynamoth.data.catalog import Catalog
from dynamoth.errors import DynamothError


class DefinitionsLost(DynamothError):
    """Raised while no log server has the definitions of queries that were there, and that nobody has dropped."""

    code = "definitions-lost"


class KnownQueries:
    """The names of all queries that were in the catalog since this process began."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def check(self, catalog: Catalog) -> None:
        """Remember what the catalog has. Raises DefinitionsLost; that ends when they are registered again or dropped.

        A query that was dropped stays in the catalog as such.
        """
        self._names |= catalog.queries.keys()
        lost = self._names - catalog.queries.keys() - catalog.dropped_queries.keys() - catalog.query_faults.keys()
        if lost:
            names = ", ".join(sorted(lost))
            raise DefinitionsLost(
                "all log servers have lost the definitions of queries, which are not executed any more: register them"
                f" again, with their datasets (`dynamoth query set FILE`): {names}"
            )
