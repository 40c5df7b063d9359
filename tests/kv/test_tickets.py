"""One fetch, one time, by the right one, in time; and memory given back exactly once whatever happens."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from disaggregated_inference.errors import Cancelled, FingerprintMismatch, NodeBusy, TicketRefused
from disaggregated_inference.kv import TicketBook
from disaggregated_inference.kv.tickets import Ticket
from tests.support.fingerprints import REFERENCE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TicketBook:
    return TicketBook(lease_s=10, clock=clock)


@pytest.fixture
def released() -> list[str]:
    return []


def issue(book: TicketBook, released: list[str], id: str = "t") -> Ticket:
    return book.issue(REFERENCE, lambda: released.append(id), id)


def test_the_whole_life(book: TicketBook, released: list[str]) -> None:
    ticket = issue(book, released)
    assert book.redeem("t", ticket.secret, "fetch", REFERENCE) is ticket
    assert book.redeem("t", ticket.secret, "fetch", REFERENCE) is ticket  # a second connection, or a resumed one
    book.fetched("t")
    book.fetched("t")
    assert released == ["t"]
    assert (book.endings["fetched"], len(book)) == (1, 0)


@pytest.mark.parametrize(
    ("id", "secret", "fetch"), [("u", None, "fetch"), ("t", "guess", "fetch"), ("t", None, "other")]
)
def test_refused(book: TicketBook, released: list[str], id: str, secret: str | None, fetch: str) -> None:
    ticket = issue(book, released)
    book.redeem("t", ticket.secret, "fetch", REFERENCE)
    with pytest.raises(TicketRefused, match="no such ticket"):
        book.redeem(id, secret or ticket.secret, fetch, REFERENCE)
    assert len(book) == 1


def test_replayed_after_it_was_fetched(book: TicketBook, released: list[str]) -> None:
    ticket = issue(book, released)
    book.redeem("t", ticket.secret, "fetch", REFERENCE)
    book.fetched("t")
    with pytest.raises(TicketRefused):
        book.redeem("t", ticket.secret, "fetch", REFERENCE)


def test_expires_unless_renewed(book: TicketBook, clock: Clock, released: list[str]) -> None:
    ticket = issue(book, released)
    clock.now += 1000  # still being computed: no fetch can be late
    book.renew("t")
    clock.now += 1000
    book.hold("t")
    for _ in range(5):
        clock.now += 9
        book.renew("t")
    assert book.redeem("t", ticket.secret, "fetch", REFERENCE) is ticket
    clock.now += 10
    with pytest.raises(TicketRefused):
        book.redeem("t", ticket.secret, "fetch", REFERENCE)
    assert (released, book.endings["expired"]) == (["t"], 1)
    book.renew("t")
    assert len(book) == 0


def test_another_model_is_refused_and_leaves_the_ticket(book: TicketBook, released: list[str]) -> None:
    ticket = issue(book, released)
    with pytest.raises(FingerprintMismatch):
        book.redeem("t", ticket.secret, "fetch", msgspec.structs.replace(REFERENCE, tokenizer="other"))
    assert book.redeem("t", ticket.secret, "fetch", REFERENCE) is ticket


def test_cancel_and_bounds(clock: Clock, released: list[str]) -> None:
    book = TicketBook(lease_s=10, most=2, clock=clock)
    issue(book, released, "a")
    with pytest.raises(TicketRefused, match="exists already"):
        issue(book, released, "a")
    issue(book, released, "b")
    with pytest.raises(NodeBusy, match="2 tickets"):
        issue(book, released, "c")
    assert book.cancel("a")
    assert not book.cancel("a")
    assert (released, book.endings["cancelled"]) == (["a"], 1)


def test_memory_is_given_back_once_under_a_race(book: TicketBook, clock: Clock) -> None:
    """Fetched, cancelled and expired at the same moment by eight threads: one of them wins, each time."""
    for number in range(50):
        released: list[str] = []
        issue(book, released, str(number))
        book.hold(str(number))
        clock.now += 10
        with ThreadPoolExecutor(8) as pool:
            ends = [book.cancel, book.fetched, lambda _: book.sweep()] * 3
            list(pool.map(lambda end, id=str(number): end(id), ends))
        assert released == [str(number)]
    endings = book.endings
    assert endings["fetched"] + endings["cancelled"] + endings["expired"] == 50


def test_a_cancellation_may_overtake_what_it_cancels() -> None:
    book = TicketBook()
    assert not book.cancel("early")
    with pytest.raises(Cancelled):
        book.issue(REFERENCE, lambda: None, "early")
    book.issue(REFERENCE, lambda: None, "early")
    assert len(book) == 1
