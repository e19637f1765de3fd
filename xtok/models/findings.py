"""What was found out about a model by trying, kept in the user's cache folder for the next process."""

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

_FORMAT = 1
"""Raised when what is tried, or how, changes: older files are then ignored."""
_VARIABLES = ("ONEDNN_", "DNNL_", "MKL_", "KMP_", "OMP_", "ATEN_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "TORCH_")
"""Environment variables by which libraries choose their kernels begin so."""


def cache_folder() -> Path:
    """The folder that xtok keeps files in between processes: `XTOK_CACHE`, or xtok in the user's cache folder."""
    named = os.environ.get("XTOK_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xtok"


def described(model: PreTrainedModel, state: Sequence[object]) -> str | None:
    """A digest of all that the bits of a model's forward passes depend on: its configuration, modules and weights, the `state`
    that it is run in, the machine, and the versions and settings of the libraries. None for a model that runs other code, too.
    """
    if not all(map(_is_known, model.modules())):
        return None
    names = model.config.to_dict().keys() - {"_name_or_path", "transformers_version"}
    config = {name: value for name, value in model.config.to_dict().items() if name in names}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    versions = torch.__version__, torch.version.cuda, transformers.__version__
    kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()]
    parts = _FORMAT, kinds, config, list(map(str, state)), versions, variables, _machine(), _weights(model)
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _is_known(module: nn.Module) -> bool:
    """Whether a module runs the code of its class alone, or besides that what accelerate and transformers put there."""
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    libraries = {str(getattr(hook, "__module__", None)).partition(".")[0] for hook in hooks}
    return libraries <= {"accelerate", "transformers"} and ("forward" not in vars(module) or hasattr(module, "_hf_hook"))


@cache
def _machine() -> list[str]:
    """The processor and the accelerators."""
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line for line in lines if line.startswith("model name")), processor)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [processor, torch.backends.cpu.get_cpu_capability(), *devices]


def _weights(model: PreTrainedModel) -> list[Any]:
    """The shape, type and two values of each weight: enough to tell one checkpoint from another, and quick to read."""
    found = list[Any]()
    for weight in model.parameters():
        found.append([list(weight.shape), str(weight.dtype)])
        if weight.is_meta or not weight.numel():
            continue
        with suppress(Exception):  # some quantised kinds can't be indexed
            first, last = (0,) * weight.dim(), (-1,) * weight.dim()
            found[-1] += [float(weight.detach()[first]), float(weight.detach()[last])]
    return found


class Findings:
    """A small JSON file. Several processes may use it: each sees a whole file, the latest that was written.

    Without a digest there is none, and a folder or file that can't be used is as good as none.
    """

    def __init__(self, digest: str | None) -> None:
        self._digest = digest
        self._path = cache_folder() / "shapes" / f"{(digest or '')[:32]}.json"

    def read(self) -> dict[str, Any] | None:
        """What was written; None if that is nothing, or no sense can be made of it."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            agreed = [[*map(int, shape), bool(agrees)] for *shape, agrees in found["agreed"]]
            spread = None if found["spread"] is None else float(found["spread"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        is_whole = self._digest and found.get("digest") == self._digest and all(len(one) == 4 for one in agreed)
        return {"agreed": agreed, "spread": spread} if is_whole else None

    def write(self, found: dict[str, Any]) -> None:
        """Replace the file as a whole. What another process wrote meanwhile and this one doesn't know is kept."""
        if self._digest is None:
            return
        before = self.read() or {"agreed": [], "spread": None}
        shapes = {tuple(shape): agrees for *shape, agrees in [*before["agreed"], *found["agreed"]]}
        spread = before["spread"] if found["spread"] is None else found["spread"]
        kept = {"digest": self._digest, "agreed": [[*shape, agrees] for shape, agrees in shapes.items()], "spread": spread}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self._path.parent, suffix=".part", encoding="utf-8", delete=False) as file:
                json.dump(kept, file)
            try:
                os.replace(file.name, self._path)
            except OSError:
                os.unlink(file.name)
