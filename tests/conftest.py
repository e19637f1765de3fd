import gc
import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings
from worlds import MADE, written

import xtok.models.load

torch.set_num_threads(1)
_FOUND = TemporaryDirectory(prefix="xtok-tests-")
os.environ["XTOK_CACHE"] = _FOUND.name  # what another run found out would hide what this one tries
xtok.models.load.best_device = lambda: torch.device("cpu")  # tests compare with models that they load there

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
for _name, _examples in (("quick", 25), ("deep", 100), ("more", 2000)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=_SLOW, derandomize=_name != "more"
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_finish() -> None:
    """What was imported stays, so that nothing looks through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def weights_stay_as_they_are() -> Iterator[None]:
    """A test that changed a model which others share would make those fail, or never end."""
    yield
    assert all(written(model) == before for model, before in MADE)
