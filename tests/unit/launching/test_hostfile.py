"""Hostfiles: what is read, and the one line a mistake is answered with."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.errors import ConfigError
from speechdp.launching.hostfile import (
    Host,
    Hostfile,
    _resolves_to_this_machine,
    is_this_machine,
    local_hosts,
    read_hostfile,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_comments_blank_lines_and_addresses(tmp_path: Path) -> None:
    path = write(
        tmp_path, "# nodes\n\nnode01 slots=2\n  node-02.example.org\tslots=16 # big\n10.0.0.3 slots=1\r\n"
    )
    hostfile = read_hostfile(path)
    assert hostfile.hosts == (Host("node01", 2), Host("node-02.example.org", 16), Host("10.0.0.3", 1))
    assert hostfile.num_slots == 19
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors on Windows begin it
    assert read_hostfile(path).hosts == hostfile.hosts


@pytest.mark.parametrize(("name", "slots"), [("local2", 2), ("local4", 4), ("cluster.example", 10)])
def test_the_shipped_files_are_read(name: str, slots: int) -> None:
    assert read_hostfile(REPOSITORY / "hostfiles" / name).num_slots == slots


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a slots=2\nb\n", 2, "has no slots; write `b slots=N`"),
        ("a slots=0\n", 1, "slots=N"),
        ("a slots=-1\n", 1, "slots=N"),
        ("a slots=two\n", 1, "slots=N"),
        ("a slots = 2\n", 1, "slots=N"),
        ("a slots=2 max_slots=4\n", 1, "max_slots"),
        ("a:2\n", 1, "not a host name"),
        ("-oProxyCommand=id slots=2\n", 1, "not a host name"),
        ("a,b slots=2\n", 1, "not a host name"),
        ("user@a slots=2\n", 1, "not a host name"),
        ("$(id) slots=2\n", 1, "not a host name"),
        ("a slots=1\n\nA slots=1\n", 3, "is already on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "\n# only a comment\n"])
def test_a_file_without_hosts_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="no hosts"):
        read_hostfile(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing: the hostfile cannot be read \(No such file"):
        read_hostfile(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary: the hostfile is no text file; see"):
        read_hostfile(binary)


def test_too_few_slots_names_file_slots_and_ranks(tmp_path: Path) -> None:
    hostfile = read_hostfile(write(tmp_path, "a slots=2\nb slots=1\n"))
    with pytest.raises(ConfigError, match=r"hosts: 4 ranks wanted, but it has only 3 slots; lower"):
        hostfile.allocate(4)
    with pytest.raises(ConfigError, match="2 ranks wanted, but it has only 1 slot; lower"):
        read_hostfile(write(tmp_path, "a slots=1\n")).allocate(2)
    with pytest.raises(ConfigError, match="at least 1 rank"):
        hostfile.allocate(0)


def test_local_hosts_refuse_no_ranks() -> None:
    assert local_hosts(3).allocate(3) == (Host("localhost", 3),)
    with pytest.raises(ConfigError, match="-np 0: at least 1 rank"):
        local_hosts(0).allocate(0)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
def test_hosts_are_filled_in_order(slots: list[int], data: st.DataObject) -> None:
    hostfile = Hostfile("f", tuple(Host(f"n{i}", n) for i, n in enumerate(slots)))
    num_ranks = data.draw(st.integers(1, hostfile.num_slots))
    placed = hostfile.allocate(num_ranks)
    assert sum(host.slots for host in placed) == num_ranks
    assert [host.name for host in placed] == [f"n{i}" for i in range(len(placed))]
    # Every host but the last is full, and none is empty.
    assert all(host.slots == slots[i] for i, host in enumerate(placed[:-1]))
    assert 1 <= placed[-1].slots <= slots[len(placed) - 1]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make this machine `vm.A.test` of address 10.1.2.3; return the names that are resolved."""
    names: list[str] = []
    addresses = {"vm.loopback.test": "127.0.1.1", "vm.own.test": "10.1.2.3", "vm.other.test": "10.1.2.4"}

    def resolve(name: str) -> str:
        names.append(name)
        if name not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return addresses[name]

    _resolves_to_this_machine.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "vm.A.test")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="10.1.2.3")]})
    return names


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST", "vm", "VM.a.test", "127.0.0.1", "127.0.1.1", "10.1.2.3"]
)
def test_this_machine_is_known_without_a_name_server(name: str, resolved: list[str]) -> None:
    assert is_this_machine(name)
    assert resolved == []


@pytest.mark.parametrize("name", ["n02", "n02.own.test", "vm2", "10.1.2.4", "10.1.2.33", "10.1"])
def test_other_names_are_other_machines_and_not_resolved(name: str, resolved: list[str]) -> None:
    assert not is_this_machine(name)
    assert resolved == []


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [("vm.loopback.test", True), ("VM.own.test", True), ("vm.other.test", False), ("vm.nowhere.test", False)],
)
def test_a_name_with_our_first_label_is_resolved_once(name: str, is_ours: bool, resolved: list[str]) -> None:
    for _ in range(2):
        assert is_this_machine(name) == is_ours
    assert resolved == [name.lower()]
