"""The rule for the names of teams, projects, keys and tiers. It is the same in CLI, config and API.

A name has 1 to 63 characters: lower-case ASCII letters, digits, '.', '_' and '-'. It begins with a letter or digit. So
two names never differ only by case, spaces or look-alike letters, and no name is a spreadsheet formula or markup.
"""

import re

from tenants.errors import Invalid
from tenants.key_format import redact

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
_NAME = re.compile(NAME_PATTERN, re.ASCII)


def is_name(text: str) -> bool:
    """Whether `text` obeys the rule. A text that does not need not be looked up."""
    return _NAME.fullmatch(text) is not None


def check_name(kind: str, name: str) -> str:
    """`name`, if it obeys the rule. Raises Invalid, which states the rule, if it does not."""
    if not is_name(name):
        shown = redact(name if len(name) <= 80 else name[:80] + "...")
        raise Invalid(
            f"{kind} name {shown!r} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit.",
            param="name",
        )
    return name
