"""Groups without ranks that note what they are asked to do."""

from __future__ import annotations

import torch

from collectives import ProcessGroup
from collectives.core.capabilities import Capabilities
from collectives.core.work import CompletedWork, Work


class Recorder(ProcessGroup):
    """A group that notes what it is asked to do."""

    def __init__(self, name: str, rank: int = 0, size: int = 2, **capabilities: object) -> None:
        super().__init__(rank, size, group_name=name)
        self.calls: list[str] = []
        self._can = Capabilities(
            **{
                "devices": frozenset({"cpu"}),
                "reductions": {torch.float32: frozenset({"SUM", "MAX"})},
                **capabilities,
            }
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._can

    def name(self) -> str:
        return "recorder"

    def _note(self, call: str) -> Work:
        self.calls.append(call)
        return CompletedWork()

    def issue(self, call):
        return self._note(call.operation.name)

    def _send(self, tensor, dst, tag):
        return self._note("send")

    def _recv(self, tensor, src, tag):
        return self._note("recv")

    def abort(self) -> None:
        self._note("abort")

    def shutdown(self) -> None:
        self._note("shutdown")


def lanes(**capabilities: object) -> list[Recorder]:
    return [Recorder(name, **capabilities) for name in "abc"]
