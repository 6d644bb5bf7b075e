"""What the lessons' tests share: tiny models, the embedded one, and the command line."""

import contextlib
import copy
import functools
import gc
import importlib.util
import json
import runpy
import shutil
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import torch

import infer
import infer_engine
import sampling
from engine.engine import Engine
from errors import UserError
from gemma import Gemma, GemmaConfig
from infer import beam_search, generate
from infer_speculative import generate_speculative
from llama import ExpertsConfig, Llama, LlamaConfig
from loading.load import load_model, save_model
from model import GPT, GPTConfig
from native import build as build_native
from sampling import SamplingParams
from text import tokenizer
from text.chat import Chat
from text.tokenizer import load_encoding

# The same examples in each run, and no time limit: the first one may have to import torch.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True)
hypothesis.settings.load_profile("course")

# The libraries are a million objects that stay, and to look for garbage among them takes time.
gc.set_threshold(100_000)
# On a busy machine several threads wait for each other, and tiny models need one.
torch.set_num_threads(1)

PLAIN = ("-O1",)  # what to compile for, instead of this processor; -O3 takes four times as long
AVX2 = ("-O1", "-mavx2", "-mfma", "-mf16c")
TARGETS = [None, PLAIN]
if torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512")):
    TARGETS.append(AVX2)

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"


def random_tokens(length: int, vocab_size: int = 61, seed: int = 0) -> list[int]:
    """A text for a model that speaks no language."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def run(model, prompts, *, generator=None, options=None, **params) -> list[list[int | None]]:
    """All steps of `generate`. options: its other arguments. params: those of SamplingParams."""
    given = {"generator": generator} if generator else {}
    return list(generate(model, prompts, SamplingParams(**params), **given, **(options or {})))


def run_rows(model, prompts, **arguments) -> list[list[int]]:
    """The tokens of each row, up to the end of its text. arguments: as of `run`."""
    steps = run(model, prompts, **arguments)
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def check_modes(model, draft, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Ragged rows, the window, speculation and one beam give the text of a pass over all."""
    params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    rows = run_rows(model, prompts, **params)
    for prompt, row in zip(prompts, rows):
        assert run_rows(model, [prompt], **params, options={"use_cache": False}) == [row]
    steps = generate_speculative(model, draft, prompts[0], SamplingParams(**params), 3)
    assert [token for step in steps for token in step.tokens] == rows[0]
    (best,) = beam_search(model, prompts[0], 1, **params)
    assert best.tokens == rows[0]


def check_command_line(cli, directory, kind: str, count: int, *options, **shape) -> None:
    """The command line writes `count` tokens as transformers' random model of this kind does."""
    shape = {"vocab_size": 4096, "eos_token_id": 4095, "max_position_embeddings": 64} | shape
    theirs, model = random_peer(kind, directory, torch.float32, **shape)
    tokenizer = (CHECKPOINTS / "stories" / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(tokenizer)
    encoding = load_encoding(model, 4096)
    prompt = encoding.encode("Once upon a time")
    (row,) = their_rows(theirs.float(), [prompt], count)
    arguments = ("--model", model, "--prompt", "Once upon a time", "--max-new-tokens", count)
    code, out, err = cli(*arguments, "--ignore-eos", *options)
    assert (code, "torch computes instead" in err) == (0, False), err
    assert out == encoding.decode(prompt + row) + "\n"


def passed_widths(model, shapes=False) -> tuple[GPT, list]:
    """The model, and a list to which its passes add how many positions (or shapes) they have."""
    seen = []

    def note(module, args):
        shape = tuple(args[0].shape)
        seen.append(shape if shapes else shape[1])

    model.wte.register_forward_pre_hook(note)
    return model, seen


def record(monkeypatch, owner, name: str, note) -> list:
    """To this list each call of a function adds what `note` makes of its arguments."""
    seen = []
    function = getattr(owner, name)

    def recorded(*args, **options):
        seen.append(note(*args))
        return function(*args, **options)

    monkeypatch.setattr(owner, name, recorded)
    return seen


def load(name, dtype=torch.float64):
    return load_model(name, dtype)


def count_calls(function) -> int:
    """Return how many functions a call makes, Python's and C's: what it costs on any machine."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def difference(ours, theirs) -> float:
    """The largest between our logits and those of transformers, of a batch of whole windows."""
    tokens = random_tokens(2 * ours.config.block_size, ours.config.vocab_size)
    windows = torch.tensor(tokens).view(2, -1)
    with torch.inference_mode():
        return (ours(windows) - theirs(windows).logits).abs().max().item()


def exact_norm(self, x):
    """For transformers' RMSNorms, which compute in float32 whatever the weights are."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def exact_gemma_norm(self, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """`random_peer` in the directory of this test, with exact norms."""
    norms = {"llama": "Llama", "mistral": "Mistral", "gemma3": "Gemma3"}
    norms |= {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
    norms |= {"smollm3": "SmolLM3", "phi3": "Phi3", "gemma2": "Gemma2"}
    for name, family in norms.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        norm = exact_gemma_norm if family.startswith("Gemma") else exact_norm
        monkeypatch.setattr(getattr(module, f"{family}RMSNorm"), "forward", norm)
    return lambda kind, **options: random_peer(kind, tmp_path, **options)


def their_rows(theirs, prompts: list[list[int]], max_new_tokens: int, **options) -> list:
    theirs.generation_config.eos_token_id = None
    tokens = torch.tensor(prompts)
    options |= {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    rows = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return rows[:, tokens.shape[1] :].tolist()


def refused(function, *args) -> str:
    with pytest.raises(UserError) as error:
        function(*args)
    message = str(error.value)
    assert message and "\n" not in message
    return message


def is_one_line(result: tuple, *words: str) -> bool:
    """Whether a run ended with exit code 2, no text, and an error of one line with these words."""
    code, out, err = result
    said = err.count("\n") == 1 and all(word in err for word in words)
    return (code, out) == (2, "") and said


def edit_json(file: Path, changes: dict) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def random_peer(kind: str, directory, saved_as=torch.float64, shard_size="1GB", **shape) -> tuple:
    """A random model of transformers, in float64, and where it is saved. kind: such as Qwen3Moe."""
    import transformers

    small = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24}
    small |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**small | shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():  # biases too, which a new model has as zeros
        mean = weight.dim() == 1 and not kind.startswith("Gemma")
        weight.data.normal_(mean=mean, std=0.4, generator=generator)
        weight.data = weight.data.to(saved_as).double()
    copy.deepcopy(model).to(saved_as).save_pretrained(directory, max_shard_size=shard_size)
    return model.eval(), directory


def pytest_collection_modifyitems(items):
    """What takes long comes last: the tests on the embedded model."""
    items.sort(key=lambda item: "stories" in item.fixturenames)


@pytest.fixture(scope="session")
def stories() -> GPT:
    """The embedded model, in float32."""
    return load_model(CHECKPOINTS / "stories")


@pytest.fixture(scope="session")
def tiny():
    """A function that builds a random model, whose greedy output wanders, without rounding."""

    def build(seed=0, dtype=torch.float64, eos_token_id=60, **shape) -> GPT:
        small = {"vocab_size": 61, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
        model = GPT(GPTConfig(**small | {"eos_token_ids": (eos_token_id,)} | shape)).to(dtype)
        return model.init_weights(std=0.2, generator=torch.Generator().manual_seed(seed)).eval()

    return build


@pytest.fixture(scope="session")
def story_model(tiny):
    """A random model with the vocabulary of an embedded one."""
    return tiny(vocab_size=4096, block_size=64, n_layer=1, eos_token_id=4095)


@pytest.fixture(scope="session")
def tiny_llama():
    """`tiny` for a Llama: two queries share a key, and a head is no fraction of the width."""

    def build(seed=0, dtype=torch.float64, eos_token_id=60, **shape):
        small = {"vocab_size": 61, "block_size": 16, "n_layer": 2, "n_embd": 16, "n_inner": 24}
        small |= {"n_head": 4, "n_kv_head": 2, "head_dim": 6, "tie_word_embeddings": False}
        small |= {"bos_token_id": 59, "eos_token_ids": (eos_token_id,)}
        model = Llama(LlamaConfig(**small | shape)).to(dtype)
        return model.init_weights(std=0.4, generator=torch.Generator().manual_seed(seed)).eval()

    return build


@pytest.fixture(scope="session")
def tiny_experts(tiny_llama):
    """`tiny_llama` with 5 experts of 12, of which each token takes 2. sizes: other experts."""

    def build(seed=0, sizes=None, **shape):
        experts = {"num_experts": 5, "num_experts_per_tok": 2, "n_inner": 12}
        experts |= {"norm_topk_prob": True} | (sizes or {})
        return tiny_llama(seed, qk_norm=True, experts=ExpertsConfig(**experts), **shape)

    return build


@pytest.fixture(scope="session")
def tiny_windows(tiny_llama):
    """`tiny_llama` with layers of both kinds, and texts longer than their windows."""

    def build(seed=0, sliding_windows=(3, None, 8), **shape):
        shape = {"n_layer": len(sliding_windows), "block_size": 40} | shape
        return tiny_llama(seed, sliding_windows=sliding_windows, **shape)

    return build


@pytest.fixture(scope="session")
def tiny_gemma():
    """A function that builds a random Gemma with both kinds of layers. kind: its config's class."""

    def build(
        seed=0,
        dtype=torch.float64,
        eos_token_id=60,
        sliding_windows=(3, 8, None),
        kind=GemmaConfig,
        **shape,
    ):
        small = {"vocab_size": 61, "block_size": 40, "n_layer": len(sliding_windows), "n_embd": 16}
        small |= {"n_inner": 24, "n_head": 4, "n_kv_head": 2, "head_dim": 6}
        small |= {"query_pre_attn_scalar": 5}
        small |= {"bos_token_id": 59, "eos_token_ids": (eos_token_id,), "rope_linear_factor": 8.0}
        model = Gemma(kind(sliding_windows=sliding_windows, **small | shape)).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.data.normal_(std=0.4, generator=generator)
        return model.eval()

    return build


@pytest.fixture(scope="session", params=["tiny", "tiny_llama"])
def build(request):
    """A function that builds a GPT-2, or a Llama whose query heads share keys."""
    return request.getfixturevalue(request.param)


def save_speaking(build, directory, **shape) -> Path:
    """Save a random model, block_size 64, of the embedded model's vocabulary. build: as `tiny`."""
    save_model(build(dtype=torch.float32, vocab_size=4096, block_size=64, **shape), directory)
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", directory)
    return directory


def check_bad_config(cli, build, directory, changes: dict, words: str) -> None:
    """A changed config.json of a random model is refused in one line, which names the file."""
    save_speaking(build, directory, eos_token_id=4095, bos_token_id=0)
    file = directory / "config.json"
    edit_json(file, changes)
    result = cli("--model", directory, "--prompt", "Lily", "--max-new-tokens", 2)
    assert is_one_line(result, f"{file}: ", words), result


@pytest.fixture
def tiny_checkpoint(tiny, tmp_path):
    """A directory with a random model, block_size 64, of the embedded model's vocabulary."""
    return save_speaking(tiny, tmp_path, eos_token_id=4095)


@pytest.fixture(scope="session")
def checkpoint(tiny, tmp_path_factory):
    """A model in which each token is an EOS, so a run that does not ignore EOS ends after one."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(tiny(dtype=torch.float32, block_size=64, eos_token_ids=tuple(range(61))), directory)
    return directory


@pytest.fixture(scope="session")
def client(tiny_llama):
    """A Client to a server of a random model, which all tests share."""
    from serving import serving, small_engine

    with serving(lambda: small_engine(tiny_llama)) as client:
        yield client


@pytest.fixture
def fake(monkeypatch):
    """A server of known times instead of the network."""
    from loads import fake_server

    return fake_server(monkeypatch)


@pytest.fixture
def table(capsys):
    """A function that runs the client of servers: its exit code, its table, and stderr."""
    from loads import client_table

    return client_table(capsys)


@pytest.fixture
def start(tiny):
    """A function that starts a server of a tiny model, with options of the engine: a Client."""
    from serving import serving, small_encoding

    with contextlib.ExitStack() as stack:

        def enter(model=None, app_options=None, **options):
            def make():
                return Engine(model or tiny(), encoding=small_encoding(), **options)

            return stack.enter_context(serving(make, app_options=app_options))

        yield enter


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, request):
    """Native code is compiled into a directory of this session and its workers, not the user's."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if hasattr(request.config, "workerinput") else base) / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv("CC", raising=False)
        build_native.load()
        yield


@pytest.fixture(params=TARGETS, ids=str)
def library(request, compiled):
    return build_native.load(request.param)


@pytest.fixture
def target(library, monkeypatch):
    """All code in this test is compiled for that processor."""
    monkeypatch.setattr(build_native, "load", lambda *_: library)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """native.build, as in a process that has compiled nothing; an empty cache; and little code."""
    build_native.load.cache_clear()
    for name in ("CC", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "small.c"
    source.write_text('const char kernel[64] = "small"; int linear(void) { return 1; }\n')
    monkeypatch.setattr(build_native, "SOURCE", source)
    yield build_native
    build_native.load.cache_clear()


@pytest.fixture
def compilations(fresh, monkeypatch):
    """A list to which each run of the compiler that makes code adds its command."""
    commands = []
    call = fresh.run_compiler

    def recorded(command):
        if "-c" in command:
            commands.append(command)
        return call(command)

    monkeypatch.setattr(fresh, "run_compiler", recorded)
    return commands


@pytest.fixture
def clock(monkeypatch):
    """A clock on which only passes take time: a second for each position that a model computes."""
    seconds = [0.0]
    hidden = GPT.hidden

    def timed(self, tokens, *args):
        seconds[0] += tokens.numel()
        return hidden(self, tokens, *args)

    monkeypatch.setattr(GPT, "hidden", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


@pytest.fixture
def torch_passes(monkeypatch) -> list:
    """To this list each pass of GPT-2 in torch adds the shape of its tokens."""
    return record(monkeypatch, GPT, "hidden", lambda model, tokens, *_: tokens.shape)


@pytest.fixture
def attended(monkeypatch) -> list:
    """To this list each call of torch's attention adds its queries, keys and values."""
    functions = torch.nn.functional
    return record(monkeypatch, functions, "scaled_dot_product_attention", lambda *args: args[:3])


@pytest.fixture
def torch_numbers(monkeypatch) -> list:
    """To this list each making of random numbers in torch adds how many there were."""
    return record(monkeypatch, sampling, "exponential", lambda bits: bits.numel())


ENCODINGS = {}  # what was read from a tokenizer.json of these bytes


@pytest.fixture
def run_main(capsys, monkeypatch, compiled):
    """A function that runs a script's `main` in this process: exit code, stdout, stderr."""
    read = tokenizer.read_tokenizer_json

    def read_once(file):  # each time would be a tenth of all tests of the command line
        text = file.read_bytes() if file.is_file() else file
        if text not in ENCODINGS:
            ENCODINGS[text] = read(file)
        return ENCODINGS[text]

    monkeypatch.setattr(tokenizer, "read_tokenizer_json", read_once)

    def run(main, *args) -> tuple[int, str, str]:
        try:
            main(["--device", "cpu", *(str(arg) for arg in args)])
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_file(capsys, monkeypatch):
    """A function that runs a script as a user does, but in this process: exit code, stdout."""

    def run(file, *args) -> tuple[int, str]:
        assert (ROOT / file).is_file()
        monkeypatch.setattr(sys, "argv", [file, *args])
        with pytest.raises(SystemExit) as ended:
            if file.startswith("benchmarks/"):
                name = file.removesuffix(".py").replace("/", ".")
                monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
                runpy.run_module(name, run_name="__main__")
            runpy.run_path(str(ROOT / file), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def cli(run_main):
    return functools.partial(run_main, infer.main)


@pytest.fixture(scope="session")
def chat_base(tiny, tmp_path_factory):
    """A directory with a random model and a tokenizer with control tokens, and no template."""
    from chats import save_base

    directory = tmp_path_factory.mktemp("chat_base")
    save_base(tiny, directory)
    return directory


@pytest.fixture(scope="session")
def chat_encoding(chat_base):
    return load_encoding(chat_base, 4104)


@pytest.fixture(scope="session")
def write_chat(chat_base, tmp_path_factory):
    """A function that makes a model's directory with a template: as `write_template`."""
    from chats import write_template

    def write(template, as_file=False, **config):
        directory = tmp_path_factory.mktemp("chat")
        shutil.copytree(chat_base, directory, dirs_exist_ok=True)
        write_template(directory, template, as_file, **config)
        return directory

    return write


@pytest.fixture(scope="session")
def chat_engine(tiny_llama, write_chat):
    """A function that makes an engine of a random model with the vocabulary of `write_chat`."""
    from chats import HERMES

    shape = {"vocab_size": 4104, "block_size": 1280, "bos_token_id": 4096, "eos_token_id": 4098}
    encoding = load_encoding(write_chat(HERMES), 4104)
    return lambda: Engine(tiny_llama(**shape), encoding=encoding)


@pytest.fixture(scope="session")
def chat_pair(write_chat):
    """A function that gives a template as ours, and the tokenizer of transformers."""
    made = {}

    def load(template):
        from transformers import PreTrainedTokenizerFast

        if template not in made:
            directory = write_chat(template)
            made[template] = Chat(directory), PreTrainedTokenizerFast.from_pretrained(directory)
        return made[template]

    return load


@pytest.fixture
def given_prompts(monkeypatch) -> list:
    """To this list each call of `generate` by the command line adds its prompts."""
    return record(monkeypatch, infer, "generate", lambda model, prompts, *_: prompts)


@pytest.fixture
def engine_cli(run_main):
    return functools.partial(run_main, infer_engine.main)


PROMPTS = [
    "Once upon a time",
    "A dog",
    "Tom and Lily went to the park to play with a big red ball",
    "One",
    "The sun",
]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path
