"""Log lines: no secret in them, and one object each as JSON."""

import io
import json
import logging

import pytest

from gateway import logs


@pytest.mark.case("S12")
@pytest.mark.parametrize("formatter", [logs.JsonFormatter(), logs.TextFormatter()])
def test_log_lines_lose_keys_and_tokens_wherever_they_stand(formatter: logging.Formatter) -> None:
    secret = "A1b2" * 12
    key, token = f"trz-abcdefGHIJKL-{secret}", f"trza-{secret}"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("terazi.test")
    logger.addHandler(handler)
    logger.info("message %s", key, extra={"field": f"Bearer {token}"})
    try:
        raise ValueError(f"inside {key}")
    except ValueError:
        logger.exception("failed")
    text = stream.getvalue()
    assert secret not in text
    assert "A1b2A1b2" not in text
    assert text.count("trz-abcdefGHIJKL-***") == 2


def test_json_lines_are_one_object_each_with_their_fields() -> None:
    record = logging.makeLogRecord({"name": "terazi.x", "levelname": "INFO", "msg": "a\nb", "team": "search"})
    entry = json.loads(logs.JsonFormatter().format(record))
    assert (entry["logger"], entry["level"], entry["message"], entry["team"]) == ("terazi.x", "info", "a\nb", "search")
    assert "\n" not in logs.JsonFormatter().format(record)
