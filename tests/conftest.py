import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=_SLOW, derandomize=True)
settings.register_profile("few", max_examples=20, deadline=None, suppress_health_check=_SLOW, derandomize=True)
settings.register_profile("more", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
