"""Option records of ``torch.distributed``, and the bases of backends' own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from torch._C import _distributed_c10d as c10d

from collectives.core.types import Options, ReduceOp

_NONE = timedelta(0)
_Record = TypeVar("_Record", bound="BackendOptions")


class GeneralOptions(c10d.Backend.Options):
    """torch's record of no backend in particular, which ``torch.distributed.split_group`` copies."""

    def __deepcopy__(self, memo: object) -> GeneralOptions:
        copied = GeneralOptions(self.backend, self._timeout)
        copied.group_name = self.group_name
        return copied


class BackendOptions(c10d.Backend.Options):
    """Base of the records of a backend's own options, which are dataclasses.

    ``torch.distributed`` looks for the class of torch, as in the overrides of a device mesh.
    """

    __slots__ = ()

    _backend: ClassVar[str]
    _shown: ClassVar[str]
    """What messages call the class."""

    _timeout = None  # type: ignore[assignment]  # a record says nothing of it, so that torch takes its default

    def __post_init__(self) -> None:
        super().__init__(self._backend)

    def __copy__(self) -> BackendOptions:
        return type(self)(*self._values())

    def __deepcopy__(self, memo: object) -> BackendOptions:
        return copy(self)  # records within it may be torch's, which have no copies

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.names())

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the options."""
        return tuple(one.name for one in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def of(  # noqa: PYI019 - Self is not there before Python 3.11
        cls: type[_Record], given: Any, where: str, default: Callable[[], _Record]
    ) -> _Record:
        """Returns the options that a user gave: a record, or a dict of some fields, or ``None``.

        Args:
            given: the options.
            where: what stands in front of a message.
            default: makes those that count where the user says nothing.

        Raises:
            TypeError: they are something else.
        """
        if given is None or isinstance(given, Mapping):
            fields_given = given or {}
            refuse_unknown_options(fields_given, cls.names(), where)
            return replace(default(), **fields_given)  # type: ignore[type-var]
        if not isinstance(given, cls):
            kind = type(given)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise TypeError(f"{where} they must be {cls._shown}, but are of type {module}{kind.__qualname__}")
        return given


def refuse_unknown_options(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises where options have a name that is not known.

    Args:
        given: the options by name.
        known: the names that there are.
        where: what stands in front of the message.

    Raises:
        TypeError: a name is not known; the message lists those that are.
    """
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise TypeError(f"{where} unknown are {', '.join(unknown)}; known are {', '.join(known)}")


def is_general(options: object) -> bool:
    """Returns whether options are torch's record of no backend in particular."""
    return type(options) in (c10d.Backend.Options, GeneralOptions)


REDUCE_OP_CODES = {
    hash(c10d.ReduceOp(getattr(c10d.ReduceOp, name))): op.code
    for name, op in ReduceOp.__members__.items()
    if name != "PREMUL_SUM"
}
"""Codes of the reductions without a factor, by the hash of a ``torch.distributed.ReduceOp``."""


def time_limit_of(opts: Any) -> timedelta | None:
    """Returns the time limit of a record; ``None`` where one of torch's has zero or less, as for "none"."""
    timeout: timedelta | None = opts.timeout
    return timeout if isinstance(opts, Options) or (timeout is not None and timeout > _NONE) else None
