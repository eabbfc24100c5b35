"""Log records that say which rank and which group they concern.

Every record of the package has the attributes ``rank`` and ``group``, which formats and filters of the user
may name: ``%(rank)d`` is the rank within the group, -1 where none is concerned or it is not known yet, and
``%(group)s`` the group in words, empty for none. The text begins with both, where there are any.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # before Python 3.11 it takes no parameter at run time
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """A logger whose records name a rank and a group, if any.

    Args:
        name: name of the logger, below ``collectives``.
        rank: the rank; -1 for none.
        group: the group in words; empty for none.
    """

    def __init__(self, name: str = "collectives", rank: int = -1, group: str = "") -> None:
        super().__init__(logging.getLogger(name), {"rank": rank, "group": group})
        # Arguments are formatted into the text after this has been put in front of it.
        words = group.replace("%", "%%")
        self._where = f"[rank {rank}] {words}{': ' if words else ''}" if rank >= 0 else ""

    def of(self, group: Any) -> Log:
        """Returns the log of this rank in a group, which is not kept alive.

        Args:
            group: a group of this package or of ``torch.distributed``; anything else gives this log.
        """
        if hasattr(group, "describe"):
            return Log(self.logger.name, group.rank(), group.describe())
        if hasattr(group, "group_name"):
            return Log(self.logger.name, group.rank(), f"group {group.group_name!r}")
        return self

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds rank and group to a record; messages of the package take their values as arguments."""
        return f"{self._where}{msg}", {**kwargs, "extra": self.extra}
