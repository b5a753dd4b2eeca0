import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle.scheduler.packing import first_fit_decreasing, make_blocks


def slow_first_fit_decreasing(lengths, budget):
    """The textbook loop, as the oracle."""
    rooms, bin_of = [], [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b, room in enumerate(rooms):
            if lengths[i] <= room:
                rooms[b] -= lengths[i]
                bin_of[i] = b
                break
        else:
            bin_of[i] = len(rooms)
            rooms.append(budget - lengths[i])
    return bin_of, len(rooms)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 256))
def test_equals_the_textbook_loop(lengths, budget):
    bins, count = first_fit_decreasing(np.array(lengths, dtype=np.int64), budget)
    expected, expected_count = slow_first_fit_decreasing(lengths, budget)
    assert bins.tolist() == expected
    assert count == expected_count


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 256))
def test_blocks_hold_every_datum_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths)
    blocks, tokens = make_blocks(lengths, budget)
    assert tokens == [lengths[block].sum() for block in blocks]
    assert sorted(np.concatenate(blocks).tolist()) == list(range(len(lengths)))
    for block in blocks:
        assert block.tolist() == sorted(block.tolist())
        assert lengths[block].sum() <= budget or len(block) == 1


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="budget must be positive, got 0"):
        first_fit_decreasing(np.array([1], dtype=np.int64), 0)
