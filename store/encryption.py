"""Which connections are encrypted: ``COLLECTIVES_ENCRYPTION``.

How is the core's (``backends/native/security``). Both ends of a connection must agree, and their handshake
proves what each has said.
"""

from __future__ import annotations

import os
from enum import IntEnum

import collectives._native as _native
from collectives.secret import INSECURE, SECRET, derived_key, is_insecure

ENCRYPTION = "COLLECTIVES_ENCRYPTION"


class Encryption(IntEnum):
    """What the user has asked for; the numbers are the core's."""

    BETWEEN_MACHINES = 0
    OFF = 1
    ON = 2

    def encrypts(self, between_machines: bool) -> bool:
        """Returns whether a connection is encrypted.

        Args:
            between_machines: whether it leaves this machine.
        """
        if self is Encryption.BETWEEN_MACHINES:
            return between_machines and derived_key("encryption") is not None
        return self is Encryption.ON


_VALUES = {"": Encryption.BETWEEN_MACHINES, "off": Encryption.OFF, "on": Encryption.ON}


def encryption() -> Encryption:
    """Returns what ``COLLECTIVES_ENCRYPTION`` says.

    Raises:
        ValueError: it says neither ``on`` nor ``off``, or ``on`` although everybody is let in.
    """
    value = os.environ.get(ENCRYPTION, "")
    if value not in _VALUES:
        raise ValueError(f"{ENCRYPTION} must be on or off, is {value!r}")
    if _VALUES[value] is Encryption.ON and is_insecure():
        raise ValueError(
            f"{ENCRYPTION}=on needs a job secret, and {INSECURE}=1 lets everybody in, who could then be at "
            f"the other end; unset {INSECURE} and give all ranks a secret ({SECRET})"
        )
    return _VALUES[value]


def check_libcrypto() -> None:
    """Raises :class:`~collectives.DistBackendError` where nothing can be encrypted, with the way out."""
    _native.check_libcrypto()
