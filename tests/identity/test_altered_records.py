"""Bytes of a TLS session, altered at random: the session breaks. Nothing that was altered is ever read."""

import random
import ssl
from pathlib import Path

import pytest

from disaggregated_inference.identity import Identity
from tests.support.alterations import ALTERATIONS, TIMES
from tests.support.identities import Cluster

CASES = 1000 * TIMES  # 33,000 in `make fuzz`
REQUEST, ANSWER = bytes(range(256)) * 4, bytes(reversed(range(256))) * 16


class Session:
    """A client and a server in one process. `place`: the direction and the number of the byte that is altered."""

    def __init__(self, client: Identity, server: Identity, place: tuple[bool, int], chance: random.Random) -> None:
        self._place, self._chance, self.struck = place, chance, False
        self.passed, self.read = (
            {True: 0, False: 0},
            {True: b"", False: b""},
        )  # by direction: to the server, to the client
        bios = [ssl.MemoryBIO() for _ in range(4)]
        self._to_server, self._to_client = (bios[0], bios[1]), (bios[2], bios[3])
        self._client = client.kv_client_context.wrap_bio(bios[3], bios[0])
        self._server = server.server_context.wrap_bio(bios[1], bios[2], server_side=True)

    def _carry(self, upwards: bool) -> int:
        source, target = self._to_server if upwards else self._to_client
        data, begin = source.read(), self.passed[upwards]
        self.passed[upwards] += len(data)
        direction, at = self._place
        if direction == upwards and begin <= at < begin + len(data):
            changed = self._chance.choice(ALTERATIONS)(data, at - begin, self._chance)
            self.struck, data = self.struck or changed != data, changed
        target.write(data)
        return len(data)

    def run(self) -> None:
        """Until nothing moves any more. Raises what breaks it."""
        read, asked, answered = self.read, False, False
        while True:
            moved = 0
            for mine, upwards in ((self._client, True), (self._server, False)):
                try:
                    mine.do_handshake()
                    if upwards and not asked:
                        asked = bool(mine.write(REQUEST))
                    if not upwards and read[True] == REQUEST and not answered:
                        answered = bool(mine.write(ANSWER))
                    read[not upwards] += mine.read(1 << 16)
                except ssl.SSLWantReadError:
                    pass
                moved += self._carry(upwards)
            if not moved or len(read[False]) >= len(ANSWER):
                return


@pytest.mark.slow
def test_nothing_that_was_altered_is_read(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "keys")
    client, server = Identity(cluster.client), Identity(cluster.folder_of("p1"))
    chance = random.Random(18)
    undisturbed = Session(client, server, (True, -1), chance)
    undisturbed.run()
    assert undisturbed.read == {True: REQUEST, False: ANSWER}
    struck = broken = 0
    for _ in range(CASES):
        upwards = chance.random() < 0.5
        session = Session(client, server, (upwards, chance.randrange(undisturbed.passed[upwards])), chance)
        try:
            session.run()
        except ssl.SSLError:
            broken += 1
        assert session.read[True] in (b"", REQUEST)
        assert session.read[False] == ANSWER[: len(session.read[False])]
        struck += session.struck
    assert struck > CASES * 0.8
    assert broken > struck * 0.6, "the others wait for bytes that never come"
