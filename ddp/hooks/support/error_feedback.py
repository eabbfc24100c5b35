"""What compression left out of gradients, kept for the next step: error feedback.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient
compression schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.ddp.hooks.support.adapter import is_torch_bucket, widths
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["ErrorMemory", "ParameterKeys", "working_dtype"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the data type in which gradients of ``dtype`` are compressed, and errors kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class ParameterKeys:
    """Keys that name the parameters of one model across the layouts of the buckets, and in a checkpoint.

    Our buckets know the names within the module. Those of torch do not: their parameters are numbered as they
    first appear, which is the same in every program that registers the hook on the same model before it is
    trained.
    """

    def __init__(self) -> None:
        self._numbers: Any = WeakTensorKeyDictionary()
        self._next = 0

    def of(self, bucket: GradBucket) -> tuple[str, ...]:
        """Returns the keys of a bucket's parameters, in order."""
        if not is_torch_bucket(bucket):
            return tuple(bucket.names())
        return tuple(f"parameter {self._number(parameter)}" for parameter in bucket.parameters())

    def _number(self, parameter: torch.Tensor) -> int:
        number: int | None = self._numbers.get(parameter)
        if number is None:
            number = self._numbers[parameter] = self._next
            self._next += 1
        return number

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: the reader has other parameters, and numbers them in the same way."""
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        ParameterKeys.__init__(self)


class ErrorMemory:
    """The errors of all parameters, in one flat tensor for each bucket.

    Where the buckets are laid out again, errors move to the new ones with their parameters.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._keys_of_bucket: dict[str, tuple[str, ...]] = {}

    def of(self, keys: tuple[str, ...], bucket: GradBucket) -> torch.Tensor:
        """Returns the error of a bucket, at first zeros; the caller writes the next one there.

        Args:
            keys: keys of the bucket's parameters.
            bucket: the bucket.

        Raises:
            ValueError: a parameter has another size than the error that is kept for it.
        """
        flat = self._flats.get(keys)
        buffer = bucket.buffer()
        dtype = working_dtype(buffer.dtype.to_real())
        numel = buffer.numel() * (2 if buffer.is_complex() else 1)
        # A state may go on with a model of another data type, or be given another model by mistake.
        if (
            flat is not None
            and flat.numel() == numel
            and flat.dtype is dtype
            and flat.device == buffer.device
        ):
            return flat
        return self._lay_out(keys, widths(bucket), dtype, buffer.device)

    def _lay_out(
        self, keys: tuple[str, ...], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        for key, size in zip(keys, sizes, strict=True):
            kept = self._views.get(key)
            if kept is not None and kept.numel() != size:
                raise ValueError(
                    f"the state remembers an error of {kept.numel()} elements for {key}, whose gradient has "
                    f"{size}: it belongs to another model; call reset_memory() on it to begin anew"
                )
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for key, view in zip(keys, flat.split_with_sizes(list(sizes)), strict=True):
            kept = self._views.get(key)
            if kept is not None:
                view.copy_(kept)
            self._views[key] = view
            self._keys_of_bucket[key] = keys
        live = set(self._keys_of_bucket.values())
        self._flats = {old: kept for old, kept in self._flats.items() if old in live}
        self._flats[keys] = flat
        return flat

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Returns the flat error of each parameter by key; they alias the memory."""
        return dict(self._views)

    def clear(self) -> None:
        """Forgets all errors."""
        self._flats.clear()
        self._views.clear()
        self._keys_of_bucket.clear()

    def __getstate__(self) -> dict[str, torch.Tensor]:
        """Returns a copy of each parameter's error by key."""
        return {key: view.clone() for key, view in self._views.items()}

    def __setstate__(self, errors: Mapping[str, torch.Tensor]) -> None:
        ErrorMemory.__init__(self)
        self._views.update(errors)
