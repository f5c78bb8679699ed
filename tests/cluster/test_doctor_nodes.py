"""`speechdp doctor` over real nodes: all well, and what is wrong named with its host and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import speechdp
from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.helpers.jobs import SPEECHDP
from tests.helpers.mpi import Ended

SECONDS = 480.0
Findings = dict[str, dict[str, Any]]


def doctor(lab: Lab, hostfile: Path, *options: str | Path) -> tuple[Ended, Findings]:
    """Run the doctor on n1; return how it ended and its findings that are not well, by check."""
    report = lab.folder / "doctor.json"
    command = [*SPEECHDP, "doctor", "--hostfile", hostfile, "--json", report, *options]
    ended = lab.on("n1", command, timeout_s=SECONDS)
    assert report.exists(), ended.output
    findings = json.loads(report.read_text())["findings"]
    report.unlink()
    return ended, {f["check"]: f for f in findings if f["status"] != "ok"}


def hosts_file(lab: Lab, *names: str) -> Path:
    path = lab.folder / "hosts-of-doctor"
    path.write_text("".join(f"{name} slots=1\n" for name in names))
    return path


def red(findings: Findings) -> dict[str, list[str]]:
    """Return the hosts of each red check."""
    return {check: f["hosts"] for check, f in findings.items() if f["status"] == "fail"}


@contextmanager
def other_version(lab: Lab, name: str) -> Iterator[None]:
    """Let one node have another version of speechdp."""
    own = Path(speechdp.__file__)
    script = f"echo '__version__ = \"0.0.9\"' >/run/other.py && mount --bind /run/other.py {own}"
    assert lab.on(name, ["sh", "-c", script]).exit_code == 0
    try:
        yield
    finally:
        lab.on(name, ["umount", "-l", str(own)])


def test_good_nodes_are_well(lab: Lab, dataset: Dataset) -> None:
    for name in lab.names:
        lab.limit(name, "100mbit")  # what all links keep to on a busy machine, too; all are called slow
    options = ("--data", dataset.path, "--run", lab.folder / "run", "--verify", "--bandwidth-mib", "1")
    ended, findings = doctor(lab, lab.hostfile(1), *options)
    assert ended.exit_code == 0, ended.output
    assert red(findings) == {}, ended.output
    assert "every checksum matches" in ended.stdout
    for words in ("n2, n3 by ssh without a prompt", "n1-n2 ", "n2-n3 ", "n3-n1 "):
        assert words in ended.stdout, ended.output
    assert not list(lab.folder.glob(".speechdp-doctor-*"))


def test_several_wrong_things_are_named_at_once(lab: Lab, dataset: Dataset) -> None:
    lab.limit("n2", "20mbit")  # far below what the others keep up on a busy machine
    private = lab.on("n1", ["mkdir", "-p", "/run/private"])
    assert private.exit_code == 0
    with other_version(lab, "n3"):
        options = ("--data", dataset.path, "--run", "/run/private/run", "--bandwidth-mib", "1")
        ended, findings = doctor(lab, hosts_file(lab, "n1", "n2", "n3", "n9"), *options)
    assert ended.exit_code == 1, ended.output
    assert red(findings) == {
        "reachable": ["n9"],
        "speechdp version": ["n3"],
        "speechdp code": ["n3"],
        "run folder": ["n2", "n3"],
        "speed of links": ["n2"],
    }, ended.output
    assert "ethtool" in findings["speed of links"]["remedy"]


def test_one_address_and_one_name_on_two_nodes(lab: Lab) -> None:
    docker0 = (
        "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    )
    for name in ("n1", "n2"):
        assert lab.on(name, ["sh", "-c", f"{docker0} && hostname twin"]).exit_code == 0
    try:
        ended, findings = doctor(lab, hosts_file(lab, "n1", "n2"), "--part-limit-s", "30")
    finally:
        for name in ("n1", "n2"):
            lab.on(name, ["sh", "-c", f"ip link del docker0; hostname {name}"])
    assert ended.exit_code == 1, ended.output
    assert {"host names", "interfaces"} <= set(findings), ended.output
    assert "--interface eth0" in findings["interfaces"]["remedy"]


def test_nodes_that_let_nobody_in(lab: Lab) -> None:
    assert lab.on("n1", ["sh", "-c", f"echo '{lab.address('n2')} stranger' >>/etc/hosts"]).exit_code == 0
    assert lab.on("n1", ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/key"]).exit_code == 0
    lab.cut("n3")
    known_hosts = lab.ssh_config.parent / "known_hosts"
    agent = f"ssh -F none -o UserKnownHostsFile={known_hosts} -o IdentitiesOnly=yes -i /run/key"
    for hosts, options, remedy in (
        (("stranger",), (), "ssh-keyscan -H stranger"),
        (("n2",), (f"--mpi-args=--mca plm_rsh_agent '{agent}'",), "ssh-copy-id n2"),
        (("n3",), (), "ping n3"),
    ):
        ended, findings = doctor(lab, hosts_file(lab, *hosts), *options)
        assert ended.exit_code == 1, ended.output
        assert red(findings) == {"reachable": list(hosts)}, ended.output
        assert remedy in findings["reachable"]["remedy"]
