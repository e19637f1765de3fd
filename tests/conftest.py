import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
for _name, _examples in (("quick", 40), ("deep", 200), ("more", 2000)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=_SLOW, derandomize=_name != "more"
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
