"""PostLocalSGDOptimizer: an optimizer that averages parameters over ranks every so many steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from collectives.ddp.model_averaging import ModelAverager
from collectives.dynamo import Uncompiled


def _of_the_wrapped(name: str) -> Callable[..., Any]:
    """Returns a method that calls the one of this name of the wrapped optimizer, whose hooks those are."""

    def register(self: PostLocalSGDOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optim, name)(*args, **kwargs)

    register.__name__ = name
    register.__doc__ = (
        f"Returns the handle of a hook of the wrapped optimizer, as its ``{name}`` does.\n\n"
        "The steps of that optimizer end before parameters are averaged.\n\n"
        "Args:\n    args: as that method takes them.\n    kwargs: likewise."
    )
    return register


class PostLocalSGDOptimizer(Optimizer, Uncompiled):
    """Wraps an optimizer; after each of its steps, a model averager may average the parameters.

    Post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"), in the form of
    ``torch.distributed.optim.PostLocalSGDOptimizer``. While gradients are averaged over all ranks, which the
    averager takes for its warm-up, this is the wrapped optimizer. Afterwards each rank, or each group of
    ranks, goes its own way, and parameters are averaged periodically.

    All ranks of the averager's group call :meth:`step` alike.

    Args:
        optim: the optimizer to wrap; ``param_groups`` and ``state`` are its own.
        averager: averages the parameters that have gradients, the same on all ranks; its step counts the
            calls of :meth:`step`.

    Raises:
        TypeError: an argument is of another kind.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel
            from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
            from collectives.ddp.model_averaging import PeriodicModelAverager
            from collectives.ddp.optim import PostLocalSGDOptimizer

            model = DistributedDataParallel(torch.nn.Linear(8, 1))
            mine, _ = collectives.new_subgroups(1)
            model.register_comm_hook(PostLocalSGDState(None, mine, 100), post_localSGD_hook)
            optimizer = PostLocalSGDOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=4, warmup_steps=100)
            )
            model(torch.randn(16, 8)).sum().backward()
            optimizer.step()
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be an Optimizer, but is of type {type(optim).__name__}")
        if not callable(getattr(averager, "average_parameters", None)) or not hasattr(averager, "step"):
            raise TypeError(f"averager must be a ModelAverager, but is of type {type(averager).__name__}")
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    register_step_pre_hook = _of_the_wrapped("register_step_pre_hook")
    register_step_post_hook = _of_the_wrapped("register_step_post_hook")
    register_state_dict_pre_hook = _of_the_wrapped("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_the_wrapped("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_the_wrapped("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_the_wrapped("register_load_state_dict_post_hook")

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the wrapped optimizer, then has the averager do its part. Blocks where that does.

        Args:
            closure: computes the gradients and returns the loss.

        Returns:
            What the wrapped optimizer returns.
        """
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters.

        Args:
            set_to_none: whether they become ``None`` instead of zeros.
        """
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer; called on all ranks alike.

        Args:
            param_group: ``"params"`` and options, as the wrapped optimizer takes it.
        """
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer and that of the averager, under ``"step"`` at least."""
        averager: Any = self.averager  # which may be one of torch's
        its = averager.state_dict() if isinstance(averager, ModelAverager) else {"step": averager.step}
        return self.optim.state_dict() | its

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; warm-up does not begin again.

        Where there is no ``"step"``, as in the state of the wrapped optimizer alone, warns, and the averager
        begins at step 0.

        Args:
            state_dict: the same on all ranks; copied as the wrapped optimizer does.

        Raises:
            ValueError: it lacks what an averager with a state of its own needs; nothing was loaded.
        """
        averager: Any = self.averager
        names = averager.STATE if isinstance(averager, ModelAverager) else ModelAverager.STATE
        missing = [name for name in names if name != "step" and name not in state_dict]
        if missing:
            raise ValueError(f"the state has nothing of a {type(averager).__name__}: {', '.join(missing)}")
        if "step" not in state_dict:
            warnings.warn(
                'the state has no "step" of a model averager, which begins at step 0, with its warm-up',
                stacklevel=2,
            )
            averager.step = 0
        elif isinstance(averager, ModelAverager):
            averager.load_state_dict({name: state_dict[name] for name in names})
        else:
            averager.step = state_dict["step"]
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key not in names})

    def __getstate__(self) -> dict[str, Any]:
        """Refuses to be pickled or copied: that would need the averager's group.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied; save state_dict()")
