"""How many bytes to ask a storage for at once, by how long its answers took."""

from __future__ import annotations

from torch_dataloader_utils.storage.request_size import (
    FIRST_BYTES,
    MOST_ANSWERS,
    MOST_BYTES,
    SMALLEST_ANSWER,
    Answer,
    RequestSize,
)

MB = 1_000_000


def size_after(*answers: Answer) -> int:
    size = RequestSize()
    for answer in answers:
        size.note(answer)
    return size.bytes


def test_without_answers_it_is_what_storages_advise_and_may_turn_out_to_be_more():
    size = RequestSize()
    assert not size.is_known
    assert (size.bytes, size.most_bytes) == (FIRST_BYTES, MOST_BYTES)
    size.note(Answer(5 * MB, waited=0.03, received=0.05))
    assert size.is_known
    assert size.most_bytes == size.bytes == 9 * MB


def test_waiting_takes_a_quarter_of_the_time():
    assert size_after(*[Answer(5 * MB, waited=0.03, received=0.05)] * 8) == 9 * MB


def test_a_server_that_makes_requests_wait_for_one_another_is_asked_for_much_at_once():
    assert size_after(*[Answer(5 * MB, waited=0.6, received=0.01)] * 8) == MOST_BYTES
    assert size_after(*[Answer(5 * MB, waited=0.3, received=0.0)] * 8) == MOST_BYTES


def test_a_slow_network_is_asked_for_little_at_once():
    assert size_after(*[Answer(MB, waited=0.001, received=1.0)] * 8) == 3000


def test_answers_that_are_too_small_to_tell_are_left_out_and_old_ones_forgotten():
    small = [Answer(SMALLEST_ANSWER - 1, waited=1, received=0)] * 8
    fast, slow = Answer(MB, waited=1, received=0), Answer(MB, waited=0.001, received=1.0)
    assert size_after(*small) == FIRST_BYTES
    assert size_after(fast, *[slow] * MOST_ANSWERS) == 3000
