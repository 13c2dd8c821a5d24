"""The manager under random work, against a memory that knows which tokens each page must hold."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from manager_machine import ManagerMachine

quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


class TestManager(ManagerMachine.TestCase):  # case 75
    settings = settings(
        max_examples=100, stateful_step_count=30, derandomize=True, phases=[Phase.explicit, Phase.generate], **quiet
    )


@pytest.mark.soak
class TestManagerSoak(ManagerMachine.TestCase):  # case 75: up to 180,000 steps
    settings = settings(max_examples=3000, stateful_step_count=60, **quiet)
