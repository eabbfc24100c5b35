"""Model averaging: ranks train on their own for some steps, then average their parameters."""

from __future__ import annotations

from collectives.ddp.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from collectives.ddp.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from collectives.ddp.model_averaging.utils import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
