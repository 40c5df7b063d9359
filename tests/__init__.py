import pytest

pytest.register_assert_rewrite("tests.support")  # before anything imports it
