from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from gpulayer.errors import KeyFileError, UsageError
from gpulayer.wire import keys


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def new_public() -> str:
    return keys.new_pair().public


def test_authorize_lists_the_key_with_role_and_comment(home):
    one, two = new_public(), new_public()
    keys.authorize(home, one, "driver", "laptop of Jos\u00e9, with # and spaces")
    keys.authorize(home, two, "viewer")
    assert keys.list_keys(home) == [
        keys.AuthorizedKey("driver", one, "laptop of Jos\u00e9, with # and spaces"),
        keys.AuthorizedKey("viewer", two),
    ]
    assert (home / "authorized_keys").stat().st_mode & 0o777 == 0o600


def test_authorize_replaces_the_role_and_keeps_the_users_own_comments(home):
    public = new_public()
    keys.authorize(home, public, "driver")
    path = home / "authorized_keys"
    path.write_text(f"# mine\n\n  # and this\n{path.read_text()}")
    keys.authorize(home, public, "viewer", "less now")
    assert path.read_text() == f"# mine\n\n  # and this\nviewer {public} less now\n"


@pytest.mark.parametrize("comment", ["a\ndriver x", "a\rb", "a\u2028b", "a\x00b", "a\x1b[31m"])
def test_authorize_refuses_a_comment_that_could_be_a_second_line(home, comment):
    with pytest.raises(UsageError, match="line break"):
        keys.authorize(home, new_public(), "viewer", comment)
    assert keys.list_keys(home) == []


def test_authorize_refuses_an_unknown_role_and_what_is_no_key(home):
    with pytest.raises(UsageError, match="'root' is not a role; choose one of driver, agent, viewer"):
        keys.authorize(home, new_public(), "root")
    with pytest.raises(UsageError, match="not a role"):
        keys.authorize(home, new_public(), "revoked")
    with pytest.raises(UsageError, match="not a public key"):
        keys.authorize(home, "x", "driver")


def test_revoke_says_whether_the_key_was_trusted(home):
    public = new_public()
    keys.authorize(home, public, "driver")
    assert keys.revoke(home, public)
    assert not keys.revoke(home, public)
    assert keys.list_keys(home) == []
    assert (home / "authorized_keys").read_text() == f"revoked {public}\n"


def test_revoke_forgets_the_hosts_that_hold_the_key(home):
    bad, good = new_public(), new_public()
    keys.trust_host(home, "gpu1", bad)
    keys.trust_host(home, "gpu2", good)
    assert keys.revoke(home, bad)
    assert keys.known_host(home, "gpu1") is None
    assert keys.known_host(home, "gpu2") == good


def test_revoke_refuses_our_own_key(home):
    with pytest.raises(UsageError, match="your own key"):
        keys.revoke(home, keys.make_identity(home).public)


def test_authorize_takes_a_revocation_back(home):
    public = new_public()
    keys.revoke(home, public)
    keys.authorize(home, public, "agent")
    assert keys.list_keys(home) == [keys.AuthorizedKey("agent", public)]


@pytest.mark.parametrize("line", ["driver", "root KEY", "driver short", "KEY", "driver 'KEY'"])
def test_list_keys_names_the_line_that_it_cannot_read(home, line):
    keys.authorize(home, new_public(), "driver")
    path = home / "authorized_keys"
    path.write_text("# mine\n" + line.replace("KEY", new_public()) + "\n")
    with pytest.raises(KeyFileError, match=r"authorized_keys:2 is not of the form .role public-key comment") as caught:
        keys.list_keys(home)
    assert caught.value.line == 2


def test_list_keys_refuses_a_list_that_others_may_write(home):
    keys.authorize(home, new_public(), "driver")
    (home / "authorized_keys").chmod(0o666)
    with pytest.raises(KeyFileError, match="chmod 600"):
        keys.list_keys(home)


def test_authorize_loses_nothing_when_many_edit_at_once(home):
    publics = [new_public() for _ in range(12)]
    threads = [threading.Thread(target=keys.authorize, args=(home, public, "agent")) for public in publics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.public for key in keys.list_keys(home)) == sorted(publics)


def test_known_host_finds_a_host_however_it_is_written(home):
    four, six = new_public(), new_public()
    keys.trust_host(home, "GPU1.lab", four)
    keys.trust_host(home, "[::1]:7771", six)
    assert keys.known_host(home, "gpu1.lab:7770") == four
    assert keys.known_host(home, "[::1]:7771") == six
    assert keys.known_host(home, "gpu1.lab:7771") is None
    assert keys.list_hosts(home) == [keys.KnownHost("gpu1.lab:7770", four), keys.KnownHost("[::1]:7771", six)]


def test_trust_host_replaces_the_key_of_that_host_only(home):
    first, second, other = new_public(), new_public(), new_public()
    keys.trust_host(home, "gpu1", first)
    keys.trust_host(home, "gpu2", other)
    keys.trust_host(home, "gpu1:7770", second)
    assert (keys.known_host(home, "gpu1"), keys.known_host(home, "gpu2")) == (second, other)
    assert len(keys.list_hosts(home)) == 2


def test_trust_host_refuses_what_is_no_address_or_no_key(home):
    with pytest.raises(UsageError, match="is not a host"):
        keys.trust_host(home, "-oProxyCommand=x", new_public())
    with pytest.raises(UsageError, match="not a public key"):
        keys.trust_host(home, "gpu1", "x")


def test_known_host_names_the_line_that_it_cannot_read(home):
    keys.trust_host(home, "gpu1", new_public())
    (home / "known_hosts").write_text("gpu1:7770\n")
    with pytest.raises(KeyFileError, match="known_hosts:1"):
        keys.known_host(home, "gpu1")


# -- who may connect


def test_role_knows_our_own_key_the_listed_ones_and_nobody_else(home):
    own, agent = keys.make_identity(home).public, new_public()
    keys.authorize(home, agent, "agent")
    allow_list = keys.AllowList(home)
    assert allow_list.role(own) == "driver"
    assert allow_list.role(agent) == "agent"
    assert allow_list.role(new_public()) is None
    assert allow_list.role("") is None


def test_role_is_none_for_all_when_there_are_no_files(home):
    assert keys.AllowList(home).role(new_public()) is None


def test_role_follows_the_file(home):
    allow_list, public = keys.AllowList(home), new_public()
    seen = [allow_list.role(public)]
    for role in keys.ROLES:
        keys.authorize(home, public, role)
        seen.append(allow_list.role(public))
    keys.revoke(home, public)
    assert [*seen, allow_list.role(public)] == [None, "driver", "agent", "viewer", None]


def test_role_follows_a_new_identity_and_forgets_the_old(home):
    old = keys.make_identity(home).public
    allow_list = keys.AllowList(home)
    assert allow_list.role(old) == "driver"
    new = keys.make_identity(home, force=True).public
    assert allow_list.role(old) is None
    assert allow_list.role(new) == "driver"


def test_allow_holds_until_withdrawn(home):
    allow_list, public = keys.AllowList(home), new_public()
    allow_list.allow(public, "agent", b"one")
    assert allow_list.role(public) == "agent"
    assert keys.list_keys(home) == []
    allow_list.withdraw(b"one")
    allow_list.withdraw(b"one")
    assert allow_list.role(public) is None


def test_allow_holds_until_the_last_voucher_has_withdrawn(home):
    allow_list, public = keys.AllowList(home), new_public()
    for voucher in (b"one", b"one", b"two"):
        allow_list.allow(public, "agent", voucher)
    allow_list.withdraw(b"one")
    assert allow_list.role(public) == "agent"
    allow_list.withdraw(b"two")
    assert allow_list.role(public) is None


def test_allow_gives_way_to_what_the_file_says(home):
    allow_list, viewer, revoked = keys.AllowList(home), new_public(), new_public()
    keys.authorize(home, viewer, "viewer")
    keys.revoke(home, revoked)
    for public in (viewer, revoked):
        allow_list.allow(public, "driver", b"one")
    assert allow_list.role(viewer) == "viewer"
    assert allow_list.role(revoked) is None


def test_allow_refuses_what_is_no_key_or_role(home):
    with pytest.raises(UsageError, match="not a public key"):
        keys.AllowList(home).allow("x", "agent", b"one")
    with pytest.raises(UsageError, match="not a role"):
        keys.AllowList(home).allow(new_public(), "root", b"one")


def test_role_takes_the_revoked_line_when_a_key_has_two(home):
    public = new_public()
    keys.revoke(home, public)
    with (home / "authorized_keys").open("a") as file:
        file.write(f"driver {public}\n")
    assert keys.AllowList(home).role(public) is None


def test_role_fails_closed_and_recovers_when_the_list_cannot_be_read(home, caplog):
    own, listed, vouched = keys.make_identity(home).public, new_public(), new_public()
    keys.authorize(home, listed, "driver")
    allow_list = keys.AllowList(home)
    allow_list.allow(vouched, "agent", b"one")
    publics = [own, listed, vouched]
    path = home / "authorized_keys"
    path.chmod(0o666)
    assert [allow_list.role(public) for public in publics] == ["driver", None, None]
    path.chmod(0o600)
    assert [allow_list.role(public) for public in publics] == ["driver", "driver", "agent"]
    text = path.read_text()
    path.write_text(text + "nonsense\n")
    assert [allow_list.role(public) for public in publics] == ["driver", None, None]
    path.write_text(text)
    assert [allow_list.role(public) for public in publics] == ["driver", "driver", "agent"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "chmod 600" in errors[0]
    assert "authorized_keys:2" in errors[1]


def test_role_of_our_own_key_is_none_when_the_identity_is_readable_by_others(home, caplog):
    own = keys.make_identity(home).public
    (home / "identity.key").chmod(0o644)
    assert keys.AllowList(home).role(own) is None
    assert "chmod 600" in caplog.text
