"""What `make audit` says of what pip-audit found."""

from lint.audit import summary

SOUND = {"name": "sound", "version": "1", "vulns": []}
WEAK = {"name": "weak", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "own", "skip_reason": "not on PyPI"}


def test_a_weakness_is_told_with_the_version_that_ends_it() -> None:
    text, code = summary([SOUND, WEAK, UNKNOWN])
    assert code == 1
    assert text.splitlines()[0] == "weak 2: PYSEC-1, fixed in 3"
    assert "not audited: own" in text


def test_an_audit_of_nothing_is_no_success() -> None:
    for found in ([], [UNKNOWN, UNKNOWN, SOUND]):
        text, code = summary(found)
        assert code == 2 and "needs the network" in text


def test_sound_packages_are_a_success() -> None:
    assert summary([SOUND, SOUND]) == ("2 packages audited, 0 weaknesses known", 0)
