from __future__ import annotations

import os

import pytest
import torch

from gpulayer.train import checkpoint as files


def test_write_and_load_give_the_same_back(tmp_path):
    content = {"w": torch.arange(3), "n": 1, "nested": {"a": [1.5, None, "x"]}}
    files.write(tmp_path / "deep" / "a.ckpt", content)
    assert torch.equal(files.load(tmp_path / "deep" / "a.ckpt")["w"], content["w"])
    files.write(tmp_path / "b.ckpt", files.to_bytes(content))
    assert files.load(tmp_path / "b.ckpt")["nested"] == content["nested"]
    assert os.listdir(tmp_path / "deep") == ["a.ckpt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, error):
    files.write(tmp_path / "a.ckpt", {"n": 1})

    def fail(*args):
        raise error("now")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        files.write(tmp_path / "a.ckpt", {"n": 2})
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert files.load(tmp_path / "a.ckpt") == {"n": 1}


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def test_load_refuses_a_file_that_holds_code(tmp_path):
    torch.save({"x": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        files.load(tmp_path / "evil.ckpt")


def test_is_plain_knows_what_can_be_loaded():
    assert files.is_plain({"a": [1, (2.0, None)], "t": torch.ones(1)})
    assert not files.is_plain({"a": Evil()})
    assert not files.is_plain([len])
