"""Each test is in one part of a run."""

import pytest
from fixtures import schedule


@pytest.mark.parametrize("weights", [[0.0, 0.0], [3.0, 0.1, 0.0, 9.0, 2.0]], ids=str)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_each_test_is_in_one_part(weights, num_parts):
    found = [schedule.part_of(weights, weights, i, num_parts) for i in range(1, num_parts + 1)]
    assert [sum(column) for column in zip(*found, strict=True)] == [1] * len(weights)
