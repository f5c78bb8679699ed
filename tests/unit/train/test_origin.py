"""What is recorded of where a run comes from, and what never is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.data.shards.dataset import Dataset
from speechdp.train.origin import git_state, origin_facts, settings, start_facts
from speechdp.train.session import Session


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package in a checkout whose settings name a program to run."""
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/spied\n")
    spy.chmod(0o755)
    git(package.parent, "config", "core.fsmonitor", str(spy))
    return package


def test_the_checkout_is_named_and_whether_it_was_changed(checkout: Path) -> None:
    state = git_state(checkout)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (checkout.parent / "notes").write_text("not in the checkout")
    assert git_state(checkout) == state
    (checkout / "__init__.py").write_text("changed = True\n")
    assert git_state(checkout) == {**state, "dirty": True}
    assert not (checkout.parent.parent / "spied").exists()


def test_a_package_that_is_only_installed_below_a_checkout_has_no_state(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout.parent / ".venv" / "speechdp"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_state(installed) is None
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert git_state(checkout) is None


def test_settings_are_recorded_and_secrets_are_not() -> None:
    kept = {
        "OMP_NUM_THREADS": "2",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "OMPI_MCA_btl": "tcp,self",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "UCX_TLS": "tcp",
    }
    others = {
        "HOROVOD_SECRET_KEY": "s3cret",
        "HOROVOD_GLOO_TOKEN": "s3cret",
        "NCCL_PASSWORD": "s3cret",
        "SPEECHDP_API_KEY": "s3cret",
        "OMPI_MCA_orte_precondition_transports": "5ec-3e7",
        "OMPI_MCA_orte_hnp_uri": "tcp://10.0.0.1",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "SPEECHDP_LAUNCH": "[]",
        "SPEECHDP_START": "5ec4e7:1",
        "HOME": "/root",
        "PATH": "/bin",
    }
    assert settings({**others, **kept}) == kept


def test_hosts_launcher_and_scheduler_are_recorded(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=2\nn2 slots=2\n")
    facts = origin_facts(
        {
            "SPEECHDP_HOSTFILE": str(hostfile),
            "SPEECHDP_HOSTS": "n1:2,n2:2",
            "SPEECHDP_LAUNCH": json.dumps(["speechdp", "launch", "-np", "4"]),
            "SLURM_JOB_ID": "17",
        }
    )
    lines = ["n1 slots=2", "n2 slots=2"]
    assert facts["hostfile"] == {"source": str(hostfile), "lines": lines, "hosts": "n1:2,n2:2"}
    assert facts["launch"] == ["speechdp", "launch", "-np", "4"]
    assert facts["scheduler"] == {"name": "slurm", "job_id": "17"}
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("environment", "scheduler"),
    [
        ({"LSB_JOBID": "3"}, "lsf"),
        ({"PBS_JOBID": "3.server"}, "pbs"),
        ({"JOB_ID": "3", "SGE_ROOT": "/sge"}, "sge"),
        ({"JOB_ID": "3"}, None),
        ({}, None),
    ],
)
def test_job_ids_of_schedulers(environment: dict[str, str], scheduler: str | None) -> None:
    found = origin_facts(environment)["scheduler"]
    assert (found and found["name"]) == scheduler


@pytest.mark.parametrize("words", ["", "[", "{}", "3", '"text"'])
def test_an_allocation_has_no_file_and_a_launcher_of_another_kind_no_words(words: str) -> None:
    facts = origin_facts({"SPEECHDP_HOSTFILE": "SLURM_JOB_NODELIST", "SPEECHDP_LAUNCH": words})
    assert facts["hostfile"] == {"source": "SLURM_JOB_NODELIST", "lines": None, "hosts": None}
    assert facts["launch"] is None
    assert origin_facts({})["hostfile"] is None


def test_a_start_says_why(tmp_path: Path) -> None:
    comm = SerialCommunicator()
    session = Session(Dataset.__new__(Dataset), comm, torch.device("cpu"), facts={"hosts": ["n1"]})
    facts = start_facts(session, 7, {"SPEECHDP_RESTART_REASON": "rank 1 on n2 was killed"})
    assert facts == {
        "step": 7,
        "size": 1,
        "hosts": ["n1"],
        "scheduler": None,
        "reason": "rank 1 on n2 was killed",
    }
    assert start_facts(session, 0, {})["reason"] is None
