"""Environment variables: defaults, values, refusals and typing mistakes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from mok_cute import settings as module
from mok_cute.errors import ConfigError
from mok_cute.settings import Settings


def test_settings_have_the_documented_defaults_when_nothing_is_set() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings() == Settings(None, True, 60.0, 600.0, 1, "warning", None, ())


def test_settings_take_each_variable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = Settings.from_environment(
            {
                "MOK_CUTE_CACHE_DIR": "/kernels",
                "MOK_CUTE_CACHE": "0",
                "MOK_CUTE_TIMEOUT_S": "0",
                "MOK_CUTE_ENTRY_TIMEOUT_S": "1.5",
                "MOK_CUTE_CHECKS": "2",
                "MOK_CUTE_LOG": "DEBUG",
                "MOK_CUTE_TRACE": "trace.bin",
                "MOK_CUTE_ENGINE": "reference",
                "CUTE_DSL_LINEINFO": "1",
                "HOME": "/root",
            }
        )
    compiler = (("CUTE_DSL_LINEINFO", "1"),)
    assert got == Settings(Path("/kernels"), False, 0.0, 1.5, 2, "debug", Path("trace.bin"), compiler, "reference")


def test_settings_read_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_CUTE_CHECKS", "0")
    assert Settings.from_environment().checks == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOK_CUTE_CACHE", "yes"),
        ("MOK_CUTE_CHECKS", "3"),
        ("MOK_CUTE_CHECKS", ""),
        ("MOK_CUTE_TIMEOUT_S", "-1"),
        ("MOK_CUTE_TIMEOUT_S", "1 minute"),
        ("MOK_CUTE_TIMEOUT_S", "nan"),
        ("MOK_CUTE_ENTRY_TIMEOUT_S", "inf"),
        ("MOK_CUTE_LOG", "loud"),
    ],
)
def test_settings_refuse_a_value_by_name_when_it_is_malformed(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: not")):
        Settings.from_environment({name: value})


def test_settings_take_an_empty_folder_as_the_default() -> None:
    assert Settings.from_environment({"MOK_CUTE_CACHE_DIR": ""}).cache_dir is None


def test_settings_warn_of_unknown_names_and_propose_the_nearest() -> None:
    with pytest.warns(UserWarning, match="MOK_CUTE_TIMEOUT is not.*did you mean MOK_CUTE_TIMEOUT_S"):
        Settings.from_environment({"MOK_CUTE_TIMEOUT": "5"})


def test_every_variable_is_in_the_table_of_the_module() -> None:
    assert set(re.findall(r"^\| (MOK_CUTE_\w+)", module.__doc__ or "", re.MULTILINE)) == set(module.KNOWN)
