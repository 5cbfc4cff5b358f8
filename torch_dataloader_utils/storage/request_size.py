"""How many bytes to ask a storage for at once: so many that waiting for its answer takes a quarter of the time.

Smaller requests spend most of their time waiting for the first byte, of which a server that is busy makes each wait for
the others. Larger ones do not come sooner, and leave fewer connections to receive at the same time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FIRST_BYTES = 16 << 20
"""How many are received of one request before an answer tells how fast they come: the most that S3's guide to its
performance calls typical for a range,
https://docs.aws.amazon.com/whitepapers/latest/s3-optimizing-performance-best-practices/use-byte-range-fetches.html."""

MOST_BYTES = 256 << 20

RECEIVING = 3
"""How many times as long an answer is received as it is waited for. Of S3, which begins to answer after some 30 ms and
then sends some 90 MB a second, that is 8 MB, the least that the guide calls typical."""

SMALLEST_ANSWER = 1 << 18
"""Bytes of the smallest answer that tells how fast bytes come."""

MOST_ANSWERS = 16
"""How many answers, the last ones, tell how long a storage takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        size: Its bytes.
        waited: Seconds until it began.
        received: Seconds from then to its end.
    """

    size: int
    waited: float
    received: float


class RequestSize:
    """Tells from the last answers how many bytes to ask for at once. Threads may share it."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=MOST_ANSWERS)

    def note(self, answer: Answer) -> None:
        """Take an answer into account."""
        if answer.size >= SMALLEST_ANSWER:
            self._answers.append(answer)

    @property
    def is_known(self) -> bool:
        """Whether an answer has come that tells."""
        return bool(self._answers)

    @property
    def bytes(self) -> int:
        """How many bytes to ask for at once; before that is known, how many to receive of what was asked for."""
        answers = tuple(self._answers)
        if not answers:
            return FIRST_BYTES
        waited = sum(answer.waited for answer in answers) / len(answers)
        received = sum(answer.received for answer in answers)
        size = sum(answer.size for answer in answers)
        wanted = RECEIVING * waited * size
        return MOST_BYTES if wanted >= MOST_BYTES * received else int(wanted / received)

    @property
    def most_bytes(self) -> int:
        """How many bytes to ask for at once, at most: before answers tell, as many as that might turn out to be."""
        return self.bytes if self.is_known else MOST_BYTES
