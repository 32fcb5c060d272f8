"""The order of requests: Hermod's MID before type before LID, what users say, and names of classes."""

from __future__ import annotations

import itertools

import pytest

from gnnsys.comm import Kind, RequestContext, urgency
from gnnsys.comm.context import Consumer
from gnnsys.comm.urgency import AHEAD, BACKGROUND, MOST_USER, WAITED, need_of, of_request, raised, user_of

KINDS = (Kind.STEP, Kind.PUSH, Kind.PULL, Kind.SAMPLE, Kind.INDUCED, Kind.BATCH, Kind.DESCRIBE, 4711)


def test_numbers_order_as_the_three_factors_do():
    factors = list(itertools.product(range(3), range(5), range(6)))
    numbers = [urgency.urgency(*each) for each in factors]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)


def test_factors_beyond_their_range_count_as_the_last_and_stay_below_a_users_next_number():
    assert urgency.urgency(0, 3, 10**6) == urgency.urgency(0, 3, 15)
    assert urgency.urgency(10**9, 99, 99) < 1 << urgency.USER_BITS
    assert urgency.urgency(0, 0, -1) == urgency.urgency(0, 0, 0)


def test_a_users_number_goes_before_all_else_and_fits_the_header():
    for asked, (kind, other) in itertools.product(
        (-MOST_USER - 1, -1, 0, 5, MOST_USER - 1), itertools.product(KINDS, KINDS)
    ):
        first, second = of_request(kind, AHEAD, 9, asked), of_request(other, WAITED, 0, asked + 1)
        assert first < second and -(1 << 31) <= first < second < 1 << 31
        assert user_of(first) == asked and user_of(second) == asked + 1


def test_what_is_waited_for_goes_before_what_is_ahead_and_that_before_the_background():
    order = [
        of_request(Kind.STEP, WAITED), of_request(Kind.PULL, WAITED), of_request(Kind.SAMPLE, WAITED, 1),
        of_request(Kind.SAMPLE, AHEAD, 0), of_request(Kind.PULL, AHEAD), of_request(Kind.BATCH, AHEAD, 3),
        of_request(Kind.SAVE, WAITED),
    ]  # fmt: skip
    assert order == sorted(order)
    names = ["waited"] * 3 + ["ahead"] * 3 + ["background"]
    assert [urgency.CLASSES[urgency.class_of(number)] for number in order] == names


def test_levels_never_fall_as_numbers_rise():
    numbers = sorted(
        of_request(kind, need, 1, asked)
        for kind, need, asked in itertools.product(KINDS, (WAITED, AHEAD), (-3, -1, 0, 1, 7, None))
    )
    levels = [urgency.level_of(number) for number in numbers]
    assert levels == sorted(levels) and set(levels) == set(range(urgency.LEVELS))


def test_raising_makes_a_number_that_of_what_is_waited_for_and_keeps_the_users():
    for kind, layer, asked in itertools.product((Kind.SAMPLE, Kind.BATCH, Kind.INDUCED), (0, 2), (-3, 0, 1)):
        ahead, waited = of_request(kind, AHEAD, layer, asked), of_request(kind, WAITED, layer, asked)
        assert raised(ahead) == waited == raised(waited)
        assert need_of(ahead) == AHEAD and need_of(waited) == WAITED


def test_a_batch_is_ahead_until_its_consumer_asks_for_it():
    context = RequestContext(loader=3, consumer=Consumer())
    asked: list[tuple[int, int]] = []

    class Client:
        def raise_batch(self, loader: int, batch: int) -> None:
            asked.append((loader, batch))

    assert [context.at(batch).need for batch in (0, 1)] == [AHEAD, AHEAD]
    context.await_batch(0, [Client()], waits=True)
    assert [context.at(batch).need for batch in (0, 1)] == [WAITED, AHEAD]
    context.await_batch(1, [Client()], waits=False)
    assert [context.at(batch).need for batch in (0, 1, 2)] == [WAITED, WAITED, AHEAD]
    assert asked == [(3, 0)], "what is there already needs no haste"
    assert RequestContext(batch=5).need == WAITED, "who has no consumer waits itself"


def test_names_and_numbers_of_users_are_checked():
    assert urgency.user_priority("background") == BACKGROUND and urgency.user_priority(None) is None
    for given in ("urgent", MOST_USER + 1, -MOST_USER - 2, True, 1.5):
        with pytest.raises(ValueError, match="priority must be a whole number"):
            urgency.user_priority(given)
