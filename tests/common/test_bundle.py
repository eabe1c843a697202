"""Bundles for a report: what is packed, and that no secret or address is in them."""

import json
import tarfile
from pathlib import Path

import pytest

from common.bundle import clean, write_bundle
from common.errors import ConfigError, StorageError

SECRETS = {
    "HF_TOKEN=hf_abcdefghijklmnopqrst": "HF_TOKEN=(hidden)",
    "swanlab:\n  api_key: two words 'and' more": "swanlab:\n  api_key: (hidden)",
    'args: {"password": "hunter2", "rate": 1}': 'args: {"password": "(hidden)", "rate": 1}',
    "python train.py --api-key k1l2m3 --steps 3": "python train.py --api-key (hidden) --steps 3",
    "git clone https://me:pa55@git.example.org/x": "git clone https://(hidden)@git.example.org/x",
    "Authorization: Bearer abc.def.ghi": "Authorization: (hidden)",
    "wandb: logged in with sk-proj-0123456789abcdefghij": "wandb: logged in with (hidden)",
    "aws AKIAIOSFODNN7EXAMPLE": "aws (hidden)",
    "export MY_SECRET='x y z'": "export MY_SECRET='(hidden)'",
    "redis_passwd = topsecret": "redis_passwd = (hidden)",
    "PLAIN=user:abc1@host:80": "PLAIN=(hidden)@host:80",
    "PLAIN=http=u:abc1@host,https=v:abc2@host": "PLAIN=http=(hidden)@host,https=(hidden)@host",
    "PLAIN=Authorization: Bearer abc1": "PLAIN=Authorization: Bearer (hidden)",
    "PLAIN=https://host/f?sig=abc1&v=2": "PLAIN=https://host/f?sig=(hidden)&v=2",
}
OTHERS = (
    "step 3 loss 2.25, tokens/s: 1234, tokens: 5e9, max_tokens=100",
    "data:\n  tokenizer: gpt2\n  keyboard: 3\n  seq_length: 1024",
    "12:30:45 torch 2.13.0, CANN 8.0.RC1: ok",
    "listening on 127.0.0.1:29500 and 0.0.0.0",
    "PLAIN=git@github.com:organisation/name",
    "PLAIN=/usr/bin:/opt/python@3.11/bin:/bin",
)


NAMES_OF_SECRETS = (
    "OBS_AK OBS_SK DB_PWD MYSQL_PWD GITHUB_PAT HF_TOKEN PGPASSWORD API_KEY apikey MY_AUTH COOKIE AWS_CREDENTIALS JWT"
    " awsAccessKeyId PRIVATEKEY SSHKEY ENCRYPTIONKEY AUTHORIZATION BEARER MY_CREDS HF_TOKENS API_KEYS sshkeys MY_JWT"
    " OAUTH AUTHENTICATION CRED X_AMZ_SIGNATURE"
)
HARMLESS = (
    "PWD OLDPWD PATH max_tokens max_new_tokens tokenizer KEYBOARD TASK MASK AUTHOR AUTHORS PATTERN SKIP DESIGN KEYED"
)
SECRETS |= {f"{name}=x": f"{name}=(hidden)" for name in NAMES_OF_SECRETS.split()}
SECRETS |= {line: line for line in (*OTHERS, *(f"{name}=x" for name in HARMLESS.split()))}


@pytest.mark.parametrize(("line", "shown"), SECRETS.items())
def test_a_secret_is_hidden_and_other_values_stay(line: str, shown: str) -> None:
    assert clean(line, {}) == shown


def test_an_address_has_one_name_everywhere() -> None:
    names: dict[str, str] = {}
    table = clean('{"server_id": "10.1.2.3", "device_ip": "192.168.1.9"}', names)
    log = clean("peer 192.168.1.9:60000 fe80::e866:19ff:fe1e:a688 left", names)
    assert json.loads(table) == {"server_id": "address-1", "device_ip": "address-2"}
    assert log == "peer address-2:60000 address-3 left"
    assert clean("10.1.2.3", None) == "10.1.2.3"


def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "mf_parallel0").mkdir(parents=True)
    (run / "config.yaml").write_text("train:\n  max_steps: 3\nlogging:\n  api_key: s3cret\n")
    log = "peer 10.9.8.7\n" + "step\n" * 60_000 + "EI0006: Getting socket times out\n"
    (run / "mf_parallel0" / "mindformer.log").write_text(log)
    (run / "mf_parallel0" / "env.log").write_text("MY_TOKEN=s3cret\nRANK=0\n")
    (run / "weights.safetensors").write_bytes(b"\0" * 100)
    (run / "passwords.log").symlink_to("/etc/passwd")
    return run


def parts(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read().decode() for name, file in files.items() if file}


def test_a_bundle_holds_the_run_without_secrets(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("common.bundle.MAX_FILE_BYTES", most := 20_000)
    table, target = tmp_path / "table.json", tmp_path / "report.tar.gz"
    table.write_text('{"server_id": "10.9.8.7"}')
    environ = {"X_PASSWORD": "s3cret", "HCCL_PASSWORD": "s3cret", "RANK": "1", "MINE": "2"}
    notes = write_bundle(target, run=run_folder(tmp_path), table=table, environ=environ)
    found = {name.removeprefix("bundle/"): text for name, text in parts(target).items()}
    log_name = "run/mf_parallel0/mindformer.log"
    assert set(found) == {
        "versions.json", "environment.txt", "explanation.txt", "rank_table.json",
        "run/config.yaml", log_name, "run/mf_parallel0/env.log", "left_out.txt",
    }  # fmt: skip
    everything = "".join(found.values())
    assert [word for word in ("s3cret", "10.9.8.7", "root:") if word in everything] == []
    assert found["rank_table.json"] == '{"server_id": "address-1"}'
    assert found["environment.txt"] == "RANK=1\n", "only what steers a run"
    log = found[log_name]
    assert log.startswith("peer address-1\n") and log.endswith("times out\n")
    assert len(log) <= most + 100
    assert "HCCL_CONNECT_TIMEOUT" in found["explanation.txt"]
    assert json.loads(found["versions.json"])["python"]
    assert [note.split(":")[0] for note in notes] == ["run/passwords.log", log_name]
    assert target.stat().st_size < 100_000


def test_a_secret_that_is_cut_from_its_name_is_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("common.bundle.MAX_FILE_BYTES", 60)
    (tmp_path / "a.log").write_text(f"first\npassword={'s3cret' * 20}\nlast\n")
    write_bundle(tmp_path / "a.tgz", run=tmp_path, table=None, environ={})
    assert parts(tmp_path / "a.tgz")["bundle/run/a.log"] == "first\n[...]\nlast\n"


def test_an_archive_is_limited_and_its_old_file_survives_a_failure(tmp_path, monkeypatch) -> None:
    run, target = run_folder(tmp_path), tmp_path / "report.tar.gz"
    monkeypatch.setattr("common.bundle.MAX_BYTES", 10_000)
    notes = write_bundle(target, run=run, table=None, environ={})
    assert "run/mf_parallel0/mindformer.log: left out, the archive is full" in notes
    old = target.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("common.bundle._add", fail)
    with pytest.raises(StorageError, match="untouched"):
        write_bundle(target, run=run, table=None, environ={})
    assert target.read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.tar.gz", "run"]


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.tar\.gz"):
        write_bundle(tmp_path / "x.zip", run=tmp_path, table=None, environ={})
    with pytest.raises(ConfigError, match="no such folder"):
        write_bundle(tmp_path / "x.tgz", run=tmp_path / "none", table=None, environ={})
