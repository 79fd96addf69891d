"""Who is served next."""

from __future__ import annotations

import asyncio

import pytest

from veca.app.turnstile import Turnstile
from veca.errors import InputError


def test_clients_take_turns():
    """A client that sent many requests keeps nobody else waiting for all of them."""

    async def play():
        turnstile, served = Turnstile(inside=1), []

        async def call(client):
            await turnstile.enter(client)
            await asyncio.sleep(0)
            served.append(client)
            turnstile.leave()

        await asyncio.gather(*[call("greedy") for _ in range(6)], call("a"), call("b"))
        return served

    served = asyncio.run(play())
    assert len(served) == 8 and {"a", "b"} < set(served[:5])


def test_a_full_queue_lets_new_clients_in_and_no_others():
    async def play():
        turnstile = Turnstile(inside=2, waiting=6, each=4)
        calls = [asyncio.ensure_future(turnstile.enter(c)) for c in "gggggg" + "hh"]
        await asyncio.sleep(0)
        for client in "gh":
            with pytest.raises(InputError):
                await turnstile.enter(client)
        newcomer = asyncio.ensure_future(turnstile.enter("n"))
        await asyncio.sleep(0)
        assert not newcomer.done()
        for _ in range(3):  # one of each waiting client goes in
            turnstile.leave()
        await asyncio.sleep(0)
        assert newcomer.done() and sum(call.done() for call in calls) == 4
        for call in calls:
            call.cancel()

    asyncio.run(play())


def test_there_is_an_end_to_it():
    async def play():
        turnstile = Turnstile(inside=1, waiting=4)
        await turnstile.enter("first")
        calls = [asyncio.ensure_future(turnstile.enter(f"c{i}")) for i in range(100)]
        await asyncio.sleep(0)
        refused = [call for call in calls if call.done()]
        assert len(refused) == 84 and all(call.exception() for call in refused)
        for call in calls:
            call.cancel()

    asyncio.run(play())


def test_who_goes_away_gives_up_the_turn():
    async def play():
        turnstile = Turnstile(inside=1)
        await turnstile.enter("a")
        gone, just_let_in = (asyncio.ensure_future(turnstile.enter(c)) for c in "bc")
        await asyncio.sleep(0)
        gone.cancel()
        turnstile.leave()  # passes over b, who has not yet noticed
        just_let_in.cancel()  # and c goes away in the moment the turn comes
        await asyncio.gather(gone, just_let_in, return_exceptions=True)
        await asyncio.wait_for(turnstile.enter("d"), 1)  # the turn is not lost
        waits = asyncio.ensure_future(turnstile.enter("e"))
        await asyncio.sleep(0)
        assert not waits.done()  # and not given twice
        waits.cancel()

    asyncio.run(play())
