"""What holds for every test: the same examples in every run, and no verdict by the clock."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "terazi",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("terazi")
