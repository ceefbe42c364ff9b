"""Results are shared inside of one computation only, and the least recently used are discarded."""

import functools

import pytest

from autoshard.base.shared_results import shared, sharing_results


def squares(numbers: list[int], most: int) -> list[int]:
    """Return the numbers that were squared, in order, when each is requested in turn."""
    made: list[int] = []

    def square(number: int) -> int:
        made.append(number)
        return number**2

    for number in numbers:
        assert shared("square", number, functools.partial(square, number), most) == number**2
    return made


def test_results_are_shared_inside_of_one_computation() -> None:
    with sharing_results():
        assert squares([2, 3, 2], 2) == [2, 3]
        with sharing_results():
            assert squares([3, 2], 2) == []
        assert squares([2], 2) == []
    with sharing_results():
        assert squares([2], 2) == [2]


def test_nothing_is_shared_outside_of_a_computation() -> None:
    assert squares([2, 2], 2) == [2, 2]


def test_the_result_that_was_not_used_for_longest_is_discarded() -> None:
    with sharing_results():
        assert squares([1, 2, 1, 3, 1, 2], 2) == [1, 2, 3, 2]


def test_an_error_is_not_shared() -> None:
    with sharing_results():
        with pytest.raises(ZeroDivisionError):
            shared("quotient", 0, lambda: 1 // 0, 2)  # pyrefly: ignore[division-by-zero]
        assert shared("quotient", 0, lambda: 7, 2) == 7
