"""The peers of ``bench ddp``, and their names: KIND:BACKEND+OPTION+OPTION."""

from __future__ import annotations

from dataclasses import dataclass, replace

from collectives.bench.training.hooks import HOOKS, NOOP, TORCH_HOOKS

__all__ = ["BASELINE", "KINDS", "Peer"]

KINDS = ("ours", "torch", "alone")
"""Whose wrapper: this package's, torch's, none at all."""

UNUSED = "unused"
"""The option for ``find_unused_parameters=True``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer.

    Attributes:
        kind: one of :data:`KINDS`.
        backend: name of the backend; empty of ``alone``.
        hook: name of a communication hook; empty for none.
        find_unused: whether this peer looks for unused parameters, whatever the others do.
    """

    kind: str
    backend: str = ""
    hook: str = ""
    find_unused: bool = False

    @classmethod
    def parse(cls, name: str) -> Peer:
        """Returns the peer of a name.

        Raises:
            ValueError: there is no such kind or option, or the name has another form.
        """
        head, *options = name.split("+")
        kind, colon, backend = head.partition(":")
        if kind not in KINDS or (kind == "alone") == bool(colon) or (kind != "alone" and not backend):
            raise ValueError(
                f"peer {name!r} must be alone, ours:BACKEND or torch:BACKEND, with +OPTION if wanted"
            )
        hooks = {"ours": HOOKS, "torch": TORCH_HOOKS}.get(kind, {})
        known = [*hooks, UNUSED] if hooks else []
        if any(option not in known for option in options):
            raise ValueError(
                f"peer {name!r} has no known hook or option; {kind} knows "
                f"{', '.join(f'+{option}' for option in known) or 'none'}"
            )
        named = [option for option in options if option != UNUSED]
        if len(named) > 1 or len(set(options)) < len(options):
            raise ValueError(f"peer {name!r} has an option twice, or two hooks; a wrapper takes one")
        return cls(kind, backend, "".join(named), UNUSED in options)

    def __str__(self) -> str:
        head = f"{self.kind}:{self.backend}" if self.backend else self.kind
        return "+".join(part for part in (head, self.hook, UNUSED * self.find_unused) if part)

    @property
    def communicates(self) -> bool:
        """Whether the ranks' gradients are averaged."""
        return self.kind != "alone" and self.hook != NOOP

    @property
    def needs_mpi(self) -> bool:
        """Whether ``mpirun`` must start its ranks."""
        return self.kind == "ours" and "mpi" in self.backend.split(":")

    # ---- whom it is compared with ------------------------------------------------------------------------

    def without_communication(self) -> Peer:
        """Returns the peer that does the same with a hook that does nothing."""
        return replace(self, hook=NOOP)

    def plain(self) -> Peer:
        """Returns the peer that does the same without hook and options."""
        return replace(self, hook="", find_unused=False)

    def base(self) -> Peer:
        """Returns the peer among torch's over Gloo that does the same."""
        return replace(self, kind=BASELINE.kind, backend=BASELINE.backend)


BASELINE = Peer("torch", "gloo")
"""The peer that others are compared with: what users have without this package."""
