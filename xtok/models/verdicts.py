"""What was found out about a model by trying, for as long as it has the modules and weights that were tried."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from transformers import PreTrainedModel

T = TypeVar("T")


class Verdicts(Generic[T]):
    """Verdicts on models. Threads may share it; two of them may find out the same."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[PreTrainedModel, tuple[Any, T]] = WeakKeyDictionary()

    def of(self, model: PreTrainedModel, find: Callable[[PreTrainedModel], T]) -> T:
        """The verdict on `model`; `find` finds it out where there is none, or `model` was changed since. Errors aren't kept."""
        made = _made_of(model)
        kept = self._kept.get(model)
        if kept is not None and kept[0] == made:
            return kept[1]
        verdict = find(model)
        self._kept[model] = made, verdict
        return verdict


def _made_of(model: PreTrainedModel) -> Any:
    """What tells a model from itself after a layer or a weight was replaced, or converted to another dtype.

    Weights that are fetched for each forward are new objects after each, on no device.
    """
    weights = [
        (name, weight.dtype, tuple(weight.shape) if weight.is_meta else id(weight))
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None
    ]
    return [ref(module) for module in model.modules()], weights
