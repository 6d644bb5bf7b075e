"""A server that the tests with Ray share, because a start is the longest part of each."""

import pytest
from on_ray import start
from replicas import make_engine, parse, save_small
from serving import serving


@pytest.fixture(scope="session")
def model(tiny_llama, tmp_path_factory):
    return save_small(tiny_llama, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(model, tmp_path_factory):
    """A Client to two engines, these, and a Client to one."""
    with start(model, tmp_path_factory.mktemp("server")) as (client, server):
        with serving(lambda: make_engine(parse(model))) as one:
            yield client, server, one
