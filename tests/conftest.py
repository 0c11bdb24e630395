"""What all tests share."""

from hypothesis import HealthCheck, settings

# Runs are the same every time, and no slower machine makes them fail: a red test is a bug, not luck.
settings.register_profile(
    "kvreturn",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvreturn")
