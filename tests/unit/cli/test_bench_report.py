"""What `girih bench` says of its figures."""

import pytest

from girih.cli._bench_report import _profile


@pytest.mark.parametrize(("num_steps", "count"), [(1, "1 step"), (2, "2 steps")])
def test_a_profile_names_the_number_of_steps_and_no_share_is_nothing(num_steps, count):
    seconds = {"linear": 0.0995, "batch": 0.0004, "sampling": 0.0, "other": 0.0001}
    (_, whole), *parts = _profile("a step", {"num_steps": num_steps, "seconds": seconds})
    assert whole == f"{100 / num_steps:.2f} ms, the mean of {count}"
    assert [(name.strip(), text.split(", ")[1]) for name, text in parts] == [
        ("linear", "100%"), ("batch", "<1%"), ("other", "<1%"), ("sampling", "0%"),
    ]  # fmt: skip
