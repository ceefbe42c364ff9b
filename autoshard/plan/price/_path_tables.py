"""Tables of paths that programs priced one after the other share."""

from autoshard.cost import Mesh
from autoshard.plan.xla._states import Seconds


class PathTables:
    """Tables of the paths on each mesh, for programs that are priced one after the other with the same figures.

    Recipes of one program have most of their paths in common. What is oldest goes where there is too much.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._of: dict[Mesh, dict[tuple[object, ...], dict[str, Seconds]]] = {}

    def __reduce__(self) -> tuple[type["PathTables"], tuple[int]]:
        return PathTables, (self.most_bytes,)

    def of(self, mesh: Mesh) -> dict[tuple[object, ...], dict[str, Seconds]]:
        """The tables on one mesh, which become the newest."""
        self._of[mesh] = self._of.pop(mesh, {})
        return self._of[mesh]

    def trim(self) -> None:
        """Lets go of the oldest meshes until the tables take no more than they may."""
        sizes = {
            mesh: sum(table.nbytes for tables in own.values() for table in tables.values())
            for mesh, own in self._of.items()
        }
        total = sum(sizes.values())
        for mesh, size in sizes.items():
            if total <= self.most_bytes:
                return
            del self._of[mesh]
            total -= size
