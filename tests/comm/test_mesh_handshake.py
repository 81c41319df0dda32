import logging
import socket
import threading
import time
from datetime import timedelta

import msgspec
import psutil
import pytest
from torch.distributed import HashStore

from ragtag.comm import mesh_handshake
from ragtag.comm.mesh_handshake import Listening, connect_mesh
from ragtag.comm.transport import TransportError
from tests.comm.test_ring import on_threads, successes


def connected(store, world_size):
    return successes(
        range(world_size), lambda rank: connect_mesh(store, rank, world_size, address="127.0.0.1", timeout_s=20)
    )


def close(meshes):
    for sockets in meshes:
        for each in sockets.values():
            each.close()


def test_every_pair_is_connected_without_delay_on_one_interface():
    before = set(psutil.Process().net_connections("tcp"))
    meshes = connected(HashStore(), 5)
    opened = set(psutil.Process().net_connections("tcp")) - before
    assert {one.laddr.ip for one in opened} == {"127.0.0.1"}
    assert not any(one.status == psutil.CONN_LISTEN for one in opened), "nobody can call any more"
    for rank, sockets in enumerate(meshes):
        assert sorted(sockets) == [peer for peer in range(5) if peer != rank]
        for peer, each in sockets.items():
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            each.sendall(bytes([rank, peer]))
    for rank, sockets in enumerate(meshes):
        for peer, each in sockets.items():
            assert each.recv(10) == bytes([peer, rank])
    close(meshes)


def listening(store, rank) -> Listening:
    store.wait([f"listens/{rank}"])
    return msgspec.json.decode(store.get(f"listens/{rank}"), type=Listening)


def test_strangers_are_closed_and_logged_and_the_ranks_still_meet(caplog):
    store, meshes = HashStore(), {}
    hello, token = mesh_handshake._HELLO, mesh_handshake._MAGIC

    def join(rank):
        meshes[rank] = connect_mesh(store, rank, 2, address="127.0.0.1", timeout_s=20)

    with caplog.at_level(logging.WARNING, "ragtag"):
        first = threading.Thread(target=join, args=(0,), daemon=True)
        first.start()
        there = listening(store, 0)
        wrong = [
            hello.pack(token, bytes(32), 1),
            hello.pack(token, there.token, 0),
            hello.pack(token, there.token, 2),
            hello.pack(b"whatever", there.token, 1),
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
        ]
        strangers = []
        for content in wrong:
            stranger = socket.create_connection((there.address, there.port), timeout=20)
            stranger.sendall(content)
            strangers.append(stranger)
        silent = socket.create_connection((there.address, there.port), timeout=20)
        for stranger in strangers:
            assert closed(stranger), "turned away while others are awaited"
        gone = socket.create_connection((there.address, there.port), timeout=20)
        gone.close()
        join(1)
        first.join(20)
        assert closed(silent)
    assert sorted(meshes) == [0, 1]
    for each in (*strangers, silent):
        each.close()
    close(meshes.values())
    assert caplog.text.count("did not present this run's token and a missing rank") == len(wrong)
    assert "left before it had said who it is" in caplog.text
    assert "did not say who it is" in caplog.text
    assert "127.0.0.1, port" in caplog.text
    assert there.token.hex() not in caplog.text


def closed(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_crowd_that_says_nothing_does_not_keep_a_rank_out(monkeypatch, caplog):
    monkeypatch.setattr(mesh_handshake, "_STRANGERS_AT_ONCE", 3)
    store, meshes = HashStore(), {}

    def join(rank):
        meshes[rank] = connect_mesh(store, rank, 2, address="127.0.0.1", timeout_s=20)

    first = threading.Thread(target=join, args=(0,), daemon=True)
    first.start()
    there = listening(store, 0)
    crowd = [socket.create_connection((there.address, there.port), timeout=20) for _ in range(8)]
    for stranger in crowd[:5]:
        assert closed(stranger)
    join(1)
    first.join(20)
    assert sorted(meshes) == [0, 1]
    for stranger in crowd:
        stranger.close()
    close(meshes.values())
    assert caplog.text.count("one of too many") in (5, 6), "the rank itself was one more"


def test_who_does_not_call_is_named_with_address_and_port():
    store = HashStore()
    began_s = time.monotonic()
    with pytest.raises(
        TransportError, match=r"rank 0 listens on 127.0.0.1, port \d+, .* did not connect: 1, 2"
    ) as caught:
        connect_mesh(store, 0, 3, address="127.0.0.1", timeout_s=0.1)
    assert caught.value.timed_out
    assert time.monotonic() - began_s < 10


def test_who_cannot_be_reached_is_named_with_address_and_port():
    store = HashStore()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        there = Listening(address="127.0.0.1", port=port, token=bytes(32))
        store.set("listens/0", msgspec.json.encode(there).decode())
        with pytest.raises(TransportError, match=rf"rank 1 cannot reach rank 0 at 127.0.0.1, port {port}: .*firewall"):
            connect_mesh(store, 1, 2, address="127.0.0.1", timeout_s=5)


def test_who_answers_without_the_callers_token_is_not_the_peer():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        there = Listening(address="127.0.0.1", port=impostor.getsockname()[1], token=bytes(32))
        store.set("listens/0", msgspec.json.encode(there).decode())

        def answer(number):
            if number == 1:
                return connect_mesh(store, 1, 2, address="127.0.0.1", timeout_s=20)
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(caller.recv(1000))  # with what was presented to it
                return caller.recv(1000)

        errors = on_threads([0, 1], answer)
    assert errors[0] == b""
    assert "is not rank 0" in str(errors[1])


def test_a_store_that_does_not_answer_is_named():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(TransportError, match="rank 1 waits for rank 0 to listen"):
        connect_mesh(store, 1, 2, address="127.0.0.1", timeout_s=5)
