"""What listens is shut once all have come."""

from __future__ import annotations

import socket

from speechdp.comm import doors
from tests.helpers.listening import is_let_in


def test_what_began_to_listen_in_the_block_is_shut_and_its_connections_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as older:
        with doors.close_new_listeners():
            listener = socket.create_server(("127.0.0.1", 0))
            friend = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()  # the kernel may complete the connection later than its other end
        with listener, friend, accepted:
            assert not is_let_in(listener.getsockname())
            assert is_let_in(older.getsockname())
            friend.sendall(b"still here")
            assert accepted.recv(10) == b"still here"


def test_a_shut_listener_is_shut_for_its_copies_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, listener.dup() as copy:
        assert is_let_in(copy.getsockname())
        doors.shut(listener)
        assert not is_let_in(copy.getsockname())
