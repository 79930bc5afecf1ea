"""What the tests of models compare, and how a refusal must read."""

import pytest

from engine.models.store import ModelStoreError

TEXTS = (
    "Hello, world! 1234567890",
    "  two  spaces\tand tabs\n\nand lines\r\n",
    "naïve café — «quotes» … ½ €",
    "日本語 한국어 العربية हिन्दी",
    "🎉👩‍👩‍👧‍👦 emoji",
    "don't I'll we've they're",
    "def f(x):\n    return x**2  # code",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x01\x7f control",
    "",
)


def assert_one_line(error: pytest.ExceptionInfo[ModelStoreError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text
