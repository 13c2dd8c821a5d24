"""Tests that share something expensive run on one core: pytest and xdist agree on what a group is."""

import pytest


@pytest.mark.xdist_group("together")
def test_groups_take_effect(request):
    """In pytest 9.2 xdist's mark is lost without a word, and every core loads every model."""
    if request.config.getoption("loadgroup", False):  # set in xdist's workers
        assert request.node.nodeid.endswith("@together")
