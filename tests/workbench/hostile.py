"""A result whose names and texts end with strings of an attacker, for tests that no form of a report is injected by them.

``test_report_safety.py`` reads the reports, and ``test_report_browser.py`` opens one.
"""

from __future__ import annotations

from typing import Any

from onelaunch.workbench.result import Result
from tests.workbench import results

# An attack that worked would set the page's title to PWNED, or fetch a picture.
ELEMENT = '"><script>document.title="PWNED"</script><img src=x onerror=document.title="PWNED">'
HANDLER = '" onload="document.title=\'PWNED\'" x="'
LINK = "[here](javascript:document.title='PWNED') ![picture](https://example.org/p.png)"
STRUCTURE = "a | b\n\n# Heading\n\n---\n<b>bold</b>\n- item\n`code` *em* __strong__ $x_{$ &lt;"
CODES = "\x1b[2J\x1b]8;;http://example.org\x07 [red]markup[/red] \x00\u202e"
ATTACK = f"{ELEMENT} {HANDLER} {LINK} {STRUCTURE} {CODES}"
NOTES = f"# Notes\n\n{ELEMENT}\n\n{LINK} <javascript:alert(1)> [data](data:text/html,x) [page](https://example.org/)\n\n```\n{CODES}\n"

FIXED = frozenset(
    {
        "operation",
        "direction",
        "directions",
        "regime",
        "regimes",
        "over_regime",
        "status",
        "kind",
        "measure",
        "scale",
        "source",
        "combine",
        "study_digest",
        "traffic_source",
        "slug",
    }
)
"""Names of fields that stay as they are. Most hold one of a few fixed words.

A slug is validated, and a file is refused whose digest does not match its study.
"""


def hostile(attack: str = ATTACK) -> Result:
    """Return a result in which names, free texts and keys that are names end with the attack string, except :data:`FIXED`.

    The study's notes are :data:`NOTES` instead, because they are Markdown.
    """
    honest = results.proceed_on_gpu().model_dump(mode="json")
    # Failed measurements and notes of the run have texts of their own.
    honest["cells"][0] |= {"status": "error", "reason": "failed"}
    honest["notes"] = ["No A/A run at target"]
    honest["study"]["notes"] = ""
    poisoned = _poison(honest, attack)
    poisoned["study"]["notes"] = NOTES
    return Result.model_validate(poisoned)


def _poison(value: Any, attack: str, key: str = "") -> Any:
    """Return a copy of a field's value with the attack appended to its strings. ``key`` is the name of the field."""
    if isinstance(value, dict):
        names = key in ("values", "versions", "clocks", "options", "matrix_flops_per_second")
        return {f"{name}{attack}" if names else name: _poison(each, attack, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_poison(each, attack, key) for each in value]
    if isinstance(value, str) and key not in FIXED:
        return f"{value}{attack}"
    return value
