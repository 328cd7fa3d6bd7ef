"""What numpy says of columns of numbers, without sorting or hashing all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.metrics.distinct import among, distinct

numbers = st.lists(st.integers(-5, 12) | st.integers(-(2**62), 2**62), max_size=40).map(lambda x: np.array(x, np.int64))


@pytest.mark.parametrize("values", [[7, 5, 7, -1], [0, 10**9], []])
def test_different_values_and_the_place_of_each(values):
    found, place = distinct(np.array(values, np.int32))
    assert (found.tolist(), found.dtype) == (sorted(set(values)), np.int32)
    assert found[place].tolist() == values


@given(numbers, numbers)
def test_both_answer_as_numpy_does(values, known):
    found, place = distinct(values)
    of_numpy, at = np.unique(values, return_inverse=True)
    assert (found.tolist(), place.tolist()) == (of_numpy.tolist(), at.tolist())
    assert among(values, known).tolist() == np.isin(values, known).tolist()
