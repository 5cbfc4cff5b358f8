"""What `tdu bench` makes of its measurements."""

from __future__ import annotations

import pytest

from torch_dataloader_utils.cli.bench import START_SEC, BenchOptions, Sample, Setting, advise, measure, summary


def advice_of(rates: dict[tuple[int, int], list[float]]):
    samples = {Setting(*key): [Sample(0.01, int(rate), 1.0) for rate in row] for key, row in rates.items()}
    return advise([summary(setting, found, None, (1.0, None)) for setting, found in samples.items()], samples)


def test_the_fastest_setting_is_advised_where_it_is_clearly_faster():
    advice = advice_of({(0, 1024): [100, 110, 90], (4, 1024): [200, 190, 210]})
    assert advice.setting == Setting(4, 1024)
    assert "200 rows/s, the fastest of 2 settings" in advice.reason
    assert "with num_workers=0, batch_size=1024: 100 rows/s" in advice.reason


def test_fewer_processes_are_advised_where_more_are_not_clearly_faster():
    advice = advice_of({(0, 1024): [196, 198, 197], (4, 1024): [200, 201, 202], (2, 1024): [100, 100, 100]})
    assert advice.setting == Setting(0, 1024)
    assert "num_workers=4, batch_size=1024, which takes 4 more processes, is not clearly faster" in advice.reason
    assert "(1.02 to 1.03 times as fast)" in advice.reason


def test_a_setting_that_is_slower_in_one_round_is_not_clearly_faster():
    advice = advice_of({(0, 1024): [100, 130, 100], (2, 1024): [150, 120, 150]})
    assert advice.setting == Setting(0, 1024)
    assert "(0.92 to 1.50 times as fast)" in advice.reason


def test_of_equally_many_processes_the_fastest_batch_size_is_advised():
    advice = advice_of({(0, 256): [96, 97, 97], (0, 1024): [99, 99, 99], (2, 1024): [100, 100, 100]})
    assert advice.setting == Setting(0, 1024)


def test_settings_are_compared_within_each_round_since_the_machine_may_slow_down_from_one_to_the_next():
    """The median rate of the first is 150, but in each round it has half of the rate of the second."""
    advice = advice_of({(0, 1024): [150, 500, 40], (2, 1024): [300, 1000, 80]})
    assert advice.setting == Setting(2, 1024)


def test_the_announced_time_is_that_of_all_measurements():
    options = BenchOptions(workers=(0, 2), batch_sizes=(16, 64, 256), seconds=0.5, rounds=3)
    assert options.announced_seconds == pytest.approx(1.25 * 0.5 * (1 + 3 * (1 + 6)) + 3 * 3 * START_SEC)


class Counted:
    """Passes of three batches of five rows, the last of which has two."""

    def __init__(self) -> None:
        self.passes, self.taken = 0, 0

    def begin(self):
        self.passes, self.taken = self.passes + 1, 0
        for rows in (5, 5, 2):
            self.taken += rows
            yield rows

    def rows(self):
        return self.taken


def test_a_measurement_goes_on_with_the_next_pass_and_counts_each_row_once(monkeypatch):
    """The first two batches are not counted: the start, and the one that begins the count."""
    monkeypatch.setattr("torch_dataloader_utils.cli.bench.SETTLE", 0.0)
    counted = Counted()
    sample = measure(counted, seconds=0.01)
    assert counted.passes > 1
    assert sample.rows == (counted.passes - 1) * 12 + counted.taken - 10
    assert sample.seconds >= 0.01
    assert sample.rate == sample.rows / sample.seconds


def test_without_time_the_third_batch_alone_is_counted():
    """The first one is the start, and the second one begins the count."""
    counted = Counted()
    assert measure(counted, seconds=0).rows == 2
    assert (counted.passes, counted.taken) == (1, 12)
