"""What a server has to make ids of messages."""

from conftest import CHECKPOINTS
from serving import SMALL

from errors import UserError
from loading.load import resolve_source
from server.served import find_chat
from text.chat import Chat


def test_a_server_has_the_template_of_its_model_or_says_why_there_is_none():
    assert isinstance(find_chat(resolve_source(SMALL)), Chat)
    error = find_chat(resolve_source(CHECKPOINTS / "stories"))
    assert isinstance(error, UserError) and "stories" in str(error)
