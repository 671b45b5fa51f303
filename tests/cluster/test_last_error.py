# SPDX-License-Identifier: Apache-2.0
import textwrap

from cluster.server import last_error


def test_last_error_is_the_end_of_the_traceback_with_its_indented_lines() -> None:
    text = """\
        The deployment failed. Error:
        Traceback (most recent call last):
          File "x.py", line 3, in start
            run()
        ValidationError: 1 validation error
          max_model_len is too large
        """
    expected = "ValidationError: 1 validation error\n  max_model_len is too large"
    assert last_error(textwrap.dedent(text)) == expected


def test_message_without_traceback_is_kept() -> None:
    assert last_error("no resources") == "no resources"
    assert last_error("") == ""


def test_lines_of_a_message_that_are_not_indented_belong_to_it() -> None:
    text = "Traceback (most recent call last):\n  File x\nOSError: no model a/b\nAre you online?"
    assert last_error(text) == "OSError: no model a/b\nAre you online?"
