"""Results of trial forward passes of a model, kept in the user's cache folder for later processes."""

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import inf
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from xtok.models.packed import replaced_forward

_FORMAT = 8
"""Raised if what is tried, or how, changes: older files are then ignored."""
_VARIABLES = ("ONEDNN_", "DNNL_", "FBGEMM_", "MKL_", "KMP_", "OMP_", "ATEN_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "TORCH_")
"""Environment variables by which libraries choose their kernels begin so."""
_LIBRARIES = ("accelerate", "bitsandbytes", "flash-attn", "kernels", "optimum-quanto", "torch", "torchao", "transformers")
"""Packages whose releases may compute a model's layers by other kernels."""
_LARGEST = 2**20
"""How many bytes a file may have."""
_SAMPLED = 64
"""How many values of each weight are read to tell one checkpoint from another."""


def cache_folder() -> Path | None:
    """The folder for files kept between processes: `XTOK_CACHE`, or `xtok` in the user's cache folder; None without a home."""
    if named := os.environ.get("XTOK_CACHE"):
        return Path(os.path.expanduser(named))
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "xtok"
    try:
        return Path.home() / ".cache" / "xtok"
    except RuntimeError:
        return None


def described(model: PreTrainedModel, state: Sequence[object]) -> str | None:
    """A digest of all that the bits of a model's logits depend on: its configuration and weights, the `state` in which it runs,
    the machine and the libraries. None for a model that runs code besides that of its classes.
    """
    if not all(map(_is_known, model.modules())):
        return None
    names = {"_name_or_path", "transformers_version"}
    config = {name: value for name, value in model.config.to_dict().items() if name not in names}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()]
    parts = _FORMAT, kinds, config, list(map(str, state)), variables, _machine(), weights_shown(model)
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _is_known(module: nn.Module) -> bool:
    """Whether a module runs the code of its class alone, apart from hooks of accelerate and transformers."""
    hooks: list[Any] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    libraries = {str(getattr(hook, "__module__", None)).partition(".")[0] for hook in hooks}
    return libraries <= {"accelerate", "transformers"} and (replaced_forward(module) is None or hasattr(module, "_hf_hook"))


@cache
def _machine() -> list[str]:
    """The releases of the libraries that compute, the processor, by the machine's name if it has none, and the accelerators."""
    cudnn: Any = torch.backends.cudnn
    found = [f"CUDA {torch.version.cuda}, cuDNN {cudnn.version()}"]
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    processor = f"{platform.processor()} {platform.machine()} {platform.node()}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line for line in lines if line.startswith("model name")), processor)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [*found, processor, torch.backends.cpu.get_cpu_capability(), *devices]


@torch.no_grad()
def weights_shown(model: PreTrainedModel) -> list[Any]:
    """The shape, type and device of each weight and buffer, and the sum of some of its values."""
    found = list[Any]()
    for weight in chain(model.parameters(), model.buffers()):
        found.append([list(weight.shape), str(weight.dtype), str(weight.device)])
        if weight.is_meta or not weight.numel():
            continue
        with suppress(Exception):  # some quantised kinds can't be indexed
            values = weight.reshape(-1)[:: max(1, weight.numel() // _SAMPLED)]
            found[-1].append(float(values.double().sum()))
    return found


class Findings:
    """The results of a model's trials in one state, and the small JSON file that keeps them for other processes.

    `agreed`: for each (rows, ids per row, cache positions read, positions that ids need), whether a forward pass of that shape
    gave the usual bits.
    `tolerance`: that of `StableShapes`; None until it is measured.

    Processes replace the file as a whole, so each reads a complete one. Without a digest there is no file; an unreadable one
    is ignored.
    """

    def __init__(self, digest: str | None) -> None:
        self.agreed = dict[tuple[int, int, int, int], bool]()
        self.tolerance: float | None = None
        self._digest, folder = digest, cache_folder()
        self.path = None if digest is None or folder is None else folder / "shapes" / f"{digest[:32]}.json"

    def load(self) -> bool:
        """Read the file, but keep what this process found itself. Returns whether there was a valid file."""
        try:
            if self.path is None or not self.path.is_file() or self.path.stat().st_size > _LARGEST:
                return False  # reading a pipe would block forever, and what is large isn't such a file
            found = json.loads(self.path.read_text(encoding="utf-8"))
            agreed, tolerance = {tuple(shape): agrees for *shape, agrees in found["agreed"]}, found["tolerance"]
            makes_sense = all(len(shape) == 4 and type(agrees) is bool for shape, agrees in agreed.items())
            makes_sense &= all(type(number) is int and number > 0 for shape in agreed for number in shape)
            if found["digest"] != self._digest or not makes_sense or not (tolerance is None or 0 < tolerance < inf):
                return False
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return False
        self.agreed = agreed | self.agreed
        self.tolerance = tolerance if self.tolerance is None else self.tolerance
        return True

    def save(self) -> None:
        """Replace the file, keeping what other processes have written to it meanwhile."""
        if self.path is None:
            return
        self.load()
        agreed = [[*shape, agrees] for shape, agrees in self.agreed.items()]
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", encoding="utf-8", delete=False) as file:
                part = Path(file.name)
                try:
                    json.dump({"digest": self._digest, "agreed": agreed, "tolerance": self.tolerance}, file)
                    file.close()
                    part.replace(self.path)
                finally:
                    part.unlink(missing_ok=True)
