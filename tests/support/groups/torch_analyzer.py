"""torch's analyzer of flight records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder.components import builder, config_manager, loader


def analyzed(folder: Path) -> Any:
    """Returns what torch's analyzer makes of a folder."""
    arguments = config_manager.JobConfig().parse_args([str(folder)])
    details, version = loader.read_dir(arguments)
    return builder.build_db(details, arguments, version)
