"""When ways are tried again: for what lasts, in both directions, and less and less often."""

import pytest

from gnnsys.planning import Drift, DriftWatch


def _looks(watch: DriftWatch, seconds: float, num_windows: int = 5) -> tuple[float, float] | None:
    for _ in range(num_windows):
        watch.add(seconds)
    return watch.look()


def _begun(seconds: float = 1.0, **options) -> DriftWatch:
    watch = DriftWatch()
    watch.begin(seconds, **{"num_drifts": 0, **options})
    return watch


@pytest.mark.parametrize(("found", "drifts"), [(1.24, False), (1.26, True), (0.81, False), (0.79, True)])
def test_a_quarter_is_drift_slower_or_faster(found, drifts):
    watch = _begun()
    assert _looks(watch, 1.0) is None
    assert _looks(watch, found) == ((1.0, found) if drifts else None)


@pytest.mark.parametrize(("found", "drifts"), [(1.24, False), (1.26, True), (0.65, False), (0.63, True)])
def test_turns_may_be_longer_than_windows_as_they_wait_for_the_device(found, drifts):
    assert _looks(_begun(), found) == ((1.0, found) if drifts else None)


def test_what_few_windows_say_is_noise():
    assert _looks(_begun(), 2.0, num_windows=4) is None


def test_what_lasts_less_than_ten_seconds_is_noise():
    watch, seconds = _begun(0.001), 0.002
    num_windows = int(10.0 / (DriftWatch.window * seconds))
    assert _looks(watch, seconds, num_windows) is None, "a window is missing"
    assert _looks(watch, seconds, 1) == (0.001, 0.002), "those of before count"


def test_some_slow_windows_of_many_are_noise():
    watch = _begun()
    for number in range(20):
        watch.add(50.0 if number % 3 == 0 else 1.1)
    assert watch.look() is None


def test_once_windows_were_as_expected_they_are_what_others_are_compared_with():
    watch = _begun()
    assert _looks(watch, 1.2) is None
    assert _looks(watch, 1.4) is None, "a quarter more than turns measured, not than windows"
    assert _looks(watch, 1.45) is None, "and it does not follow them slowly"
    assert _looks(watch, 1.51) == (1.2, 1.51)


def test_what_a_new_trial_could_not_change_calls_for_no_other():
    """The trial measures 1.0 again, and batches take 2.0 again: seeds in an order, say, whose last ones are heavy."""
    watch = _begun()
    assert _looks(watch, 2.0) == (1.0, 2.0)
    watch.begin(1.0, num_drifts=1, before=2.0)
    watch.rest = 0
    assert _looks(watch, 2.0) is None
    assert _looks(watch, 2.6) == (2.0, 2.6)


def test_what_has_passed_by_calls_for_another_trial():
    """A way was chosen while something else had the machine, which is gone."""
    watch = _begun(1.8, num_drifts=1, before=2.0)
    watch.rest = 0
    assert _looks(watch, 1.0) == (1.8, 1.0)


def test_every_drift_has_twice_as_many_epochs_behind_it_that_are_not_looked_at():
    waited, watch = [], _begun()
    for num_drifts in range(5):
        count = 0
        watch.begin(1.0, num_drifts=num_drifts)
        while _looks(watch, 100.0) is None:
            count += 1
        waited.append(count)
    assert waited == [0, 1, 2, 4, 8]


def test_a_way_of_which_nothing_was_measured_is_compared_with_its_own_first_windows():
    watch = DriftWatch()
    watch.begin(None, num_drifts=0)
    assert _looks(watch, 3.0) is None and _looks(watch, 3.0) is None
    assert _looks(watch, 4.0) == (3.0, 4.0)


def test_state_has_all_but_the_windows():
    watch = _begun(1.5, num_drifts=3)
    watch.add(9.0)
    again = DriftWatch.from_state(watch.state_dict())
    assert again == watch and again.state_dict() == watch.state_dict()


@pytest.mark.parametrize(
    "change", [{"low": -1.0}, {"high": float("nan")}, {"low": "x"}, {"rest": "many"}, {"more": 1}, {"rest": None}]
)
def test_what_is_no_state_is_refused_in_one_line(change):
    with pytest.raises(ValueError) as error:
        DriftWatch.from_state(_begun().state_dict() | change)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("change", [{"epoch": "x"}, {"found": 0.0}, {"expected": None}, {"why": 1}])
def test_what_is_no_drift_is_refused(change):
    drift = Drift(epoch=3, way=1, expected=1.0, found=2.0)
    assert Drift.from_json(drift.to_json()) == drift
    with pytest.raises(ValueError):
        Drift.from_json(drift.to_json() | change)
