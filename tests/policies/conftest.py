"""Fixtures of the policies' tests."""

import pytest

from policies.catalog import POLICIES, make_policy
from policies.config import PolicyConfig
from policies.policy import Policy
from policies.sequences import TeamTerms


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    made = make_policy(request.param, PolicyConfig(decode_work_us=450))
    made.configure([TeamTerms(1), TeamTerms(2, weight=3, start_level=2)], 0)
    return made
