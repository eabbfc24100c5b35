"""Model averaging: ranks train on their own for some steps, then average their parameters.

Inside, in modules named as torch's: ``utils``, averages of parameters, and ``averagers``, which take them at
some steps, over all ranks or by levels of neighbours; and in ``diloco``, which torch does not have, an outer
optimizer on what ranks have changed. Not here: the optimizer that calls one
(:mod:`collectives.ddp.optim`), and averages of gradients (:mod:`collectives.ddp.reducer`).
"""

from __future__ import annotations

from collectives.ddp.model_averaging.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from collectives.ddp.model_averaging.diloco import DiLoCoAverager
from collectives.ddp.model_averaging.utils import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "DiLoCoAverager",
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
