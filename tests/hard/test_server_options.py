"""What serve.py and serve_ray.py refuse, in one line."""

import os

import pytest
from conftest import is_one_line

import serve
import serve_ray

CPUS = os.cpu_count()
SERVE = {  # option -> words of the error
    "--port=-1": "--port 0 65535",
    "--port=65536": "--port 65536 0 65535",
    "--host=": "--host 0.0.0.0",
    f"--host={70 * chr(233)}": f"--host {70 * chr(233)}",
    "--gamma=2": "--gamma --draft",
    "--drain-seconds=-1": "drain_seconds -1.0 0 1000000",
    "--drain-seconds=inf": "drain_seconds inf",
    "--drain-seconds=nan": "drain_seconds nan",
    "--max-waiting=-1": "max_waiting -1 0",
    "--max-waiting-tokens=-1": "max_waiting_tokens -1 0",
    "--api-key=": "--api-key empty",
    "--api-key=key\n": "--api-key whitespace",
    "--api-key=k\ney": "--api-key control character",
    "--api-key=k\x7fy": "--api-key control character",
    "--allowed-host=a:8000": "--allowed-host a:8000 port",
    "--allowed-host=http://a": "--allowed-host http://a",
    "--allowed-host=": "--allowed-host",
    "--allowed-host=[::1]": "--allowed-host [::1]",
}
SERVE_RAY = {
    "--replicas=0": "replicas 0 1",
    "--cpus=0.00001": "cpus 1e-05 0.0001 1000000",
    "--cpus=1e6": "cpus 1000000.0 0.0001 1000000",
    "--cpus=1e5": f"--replicas 2 --cpus 100000 {CPUS}",
    "--gamma=2": "--gamma --draft",
    "--max-replicas=1": "--max-replicas 1 --replicas 2",
    "--scale-seconds=0": "scale_seconds 0.0 1 1000000",
    "--max-replicas=1000000": f"--max-replicas 1000000 --cpus 1 {CPUS}",
}
MODEL = {
    "--max-num-seqs=0": "max_num_seqs 0 1",
    "--model=.": "config.json",
    "--model=nowhere/x/y": "'nowhere/x/y'",
}
REFUSED = [(serve.main, *case) for case in (SERVE | MODEL).items()]
REFUSED += [(serve_ray.main, *case) for case in SERVE_RAY.items()]
REFUSED.append((serve_ray.main, "--routing=luck", "--routing 'luck'"))


@pytest.mark.parametrize("main, option, words", REFUSED)
def test_what_is_wrong_is_one_line(run_main, monkeypatch, tmp_path, main, option, words):
    monkeypatch.chdir(tmp_path)
    if option not in MODEL:
        monkeypatch.setattr(serve, "load_engine", None)  # what is accepted ends here
    assert is_one_line(run_main(main, "--port", 0, option), "error: ", *words.split())
