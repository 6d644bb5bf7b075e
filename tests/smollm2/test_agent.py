"""The agent of examples/ calls two tools, and answers with what they found."""

import importlib.util

from conftest import CHECKPOINTS, ROOT
from serving import Script

ADAPTER = CHECKPOINTS / "smollm2-tools"


def test_an_agent_answers_with_what_two_tools_found(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("agent", ROOT / "examples" / "agent.py")
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    options = "--adapter", ADAPTER, "--chat-template", ADAPTER / "chat_template.jinja"
    with Script(tmp_path, "--model", "smollm2", *options) as script:
        url = f"http://127.0.0.1:{script.client().port}/v1"
        agent.main(["What is the weather in Rome?", "And what is 17 times 23?"], url)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == '  get_weather({"city": "Rome"}) -> {"sky": "sunny", "celsius": 24}'
    assert "sunny" in lines[2]
    assert lines[4] == '  multiply({"a": 17, "b": 23}) -> {"product": 391}'
    assert "391" in lines[5] and len(lines) == 6
