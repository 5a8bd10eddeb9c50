"""The command line in a terminal: conversations, closed streams, signals and their exit codes, each in its own process."""

import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import FIXTURES, answer
from standin_hub import standin_hub

from mlx_transmuter.notices import print_notice
from mlx_transmuter.tasks import text
from mlx_transmuter.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def _sigint_is_heard():
    """Ctrl-C raises here and in children also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Chat.


def test_chat_keeps_what_was_said_until_it_is_reset(run, folder, monkeypatch):
    lines = iter(["Hi", "", "More", "/reset", "Hi", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    seen = []
    stream = text.TextGeneration.stream
    monkeypatch.setattr(
        text.TextGeneration, "stream", lambda self, said, *, seed: seen.append(said) or stream(self, said, seed=seed)
    )
    code, out, _ = run("chat", "--model", folder, "-m", 3, "--system-prompt", "Be brief.")
    first, second, third = out.splitlines()
    system, hi = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert code == 0
    assert seen[0] == seen[2] == [system, hi]
    assert seen[1] == [system, hi, {"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    assert first == third == answer(folder, seen[0], max_new_tokens=3)
    assert second == answer(folder, seen[1], max_new_tokens=3)


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(run, folder, monkeypatch):
    def lines():
        yield "Hi"
        yield KeyboardInterrupt  # at the prompt: it only begins a new line
        yield "More"
        yield EOFError

    read = lines()

    def input_(prompt):
        line = next(read)
        if isinstance(line, str):
            return line
        raise line

    said = []

    def stream(self, messages, *, seed):
        said.append(messages)
        yield text.Piece("half an ")
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", input_)
    monkeypatch.setattr(text.TextGeneration, "stream", stream)
    code, out, _ = run("chat", "--model", folder)
    assert (code, out) == (0, "half an \n\nhalf an \n\n")
    assert said[1][1] == {"role": "assistant", "content": "half an "}


def test_a_conversation_that_grew_too_long_goes_on_after_a_reset(run, converted, monkeypatch):
    """Too long for the tables of rotations that this graph has."""
    folder = converted("llama_genai")
    lines = iter(["long " * 200, "/reset", "Hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, err = run("chat", "--model", folder, "-m", 2)
    assert code == 0
    assert "at most 256 tokens, where the model's table of positions ends" in err
    assert "/reset" in err
    assert out == answer(folder, [{"role": "user", "content": "Hi"}], max_new_tokens=2) + "\n"


def test_a_chat_past_the_trained_length_says_so_once(run, folder, monkeypatch):
    lines = iter(["long " * 200, "Hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, _, err = run("chat", "--model", folder, "-m", 2)
    assert (code, err.count("predefined maximum length of 256 tokens")) == (0, 1)


def test_chat_needs_a_template(run, folder, monkeypatch):
    monkeypatch.setattr(Tokenizer, "has_chat_template", False)
    code, _, err = run("chat", "--model", folder)
    assert code == 1
    assert "no chat template" in err


# A process of its own.


def process(*args, **options):
    env = {**os.environ, "MLX_DISABLE_COMPILE": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_transmuter", *map(str, args)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env, **options},
    )


def test_help_needs_no_mlx():
    code = "import sys\nfrom mlx_transmuter.cli import main\ntry: main(['generate', '--help'])\n"
    code += "except SystemExit: print('mlx.core' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "mlx_lm applies it last" in " ".join(out.split())
    assert out.endswith("False False\n")


@pytest.mark.slow
def test_a_repository_from_the_hub_and_again_without_it(tmp_path):
    with standin_hub() as server:
        server.add("user/llama", FIXTURES / "llama")
        env = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        args = ["generate", "--model", "user/llama", "-p", "Hi", "-m", 3, "--verbose", "False"]
        out, err = process(*args, env=env).communicate()
        assert "converted user/llama (model.onnx) once" in err
        assert "golden.json" not in server.downloaded()
    assert process(*args, env=env).communicate() == (out, "")
    other = process(*args[:2], "user/nothing", *args[3:], env={**env, "HF_HUB_OFFLINE": "1"})
    assert "offline" in other.communicate()[1]
    assert other.returncode == 1


def test_a_reader_that_goes_is_no_error(folder):
    child = process("generate", "--model", folder, "-p", "Hi", "-m", 5)
    child.stdout.close()
    child.stdout = None
    assert child.communicate()[1] == ""
    assert child.returncode == 141


def test_ctrl_c_in_a_text_is_exit_code_130(folder, tmp_path):
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    (endless / "generation_config.json").write_text('{"suppress_tokens": [2]}')  # the only eos
    child = process("generate", "--model", endless, "-p", "Hi", "-m", 200, bufsize=0)
    assert child.stdout.read(10) == "=========="
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, err.strip()) == (130, "")
    assert "Generation:" not in out


def test_chat_answers_help_and_unknown_commands(run, folder, monkeypatch):
    lines = iter(["/help", "/rest", "/reset now", " /rest", "/usr/bin holds what?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(text.TextGeneration, "stream", stream_of_the_last_message)
    code, out, err = run("chat", "--model", folder)
    assert (code, out) == (0, "[' /rest']\n['/usr/bin holds what?']\n")
    start, commands, unknown, arguments = err.splitlines()
    assert start == commands
    for command in ("/help", "/reset", "/exit", "Ctrl-D"):
        assert command in commands
        assert command in unknown
    assert "no command '/rest'. Did you mean /reset?" in unknown
    assert "no command '/reset now'" in arguments


def stream_of_the_last_message(self, messages, *, seed):
    yield text.Piece(str([messages[-1]["content"]]))


# Chat in a child whose answers are the turns themselves.
ECHO_CHAT = """
import sys
from mlx_transmuter.cli import main
from mlx_transmuter.tasks import text

def stream(self, messages, *, seed):
    yield text.Piece(str([messages[-1]["content"]]))

text.TextGeneration.stream = stream
sys.exit(main(["chat", "--model", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("typed", "turns"),
    [
        (b"one\rtwo\r\rthree\r", ["['one\\ntwo\\n\\nthree']"]),
        (b"\x1b[200~one\rtwo\x1b[201~\r", ["['one\\ntwo']"]),
        (b"/reset\rone\r", ["['one']"]),
    ],
)
def test_a_pasted_block_is_one_turn(folder, typed, turns):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", ECHO_CHAT, str(folder)], {**os.environ, "TERM": "xterm"})
    shown = read_until(terminal, b"> ")
    os.write(terminal, typed)
    shown += read_until(terminal, b"']\r\n") + read_until(terminal, b"> ")
    os.write(terminal, b"/exit\r")
    read_until(terminal, b"nothing")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert [line for line in shown.decode().splitlines() if line.startswith("['")] == turns


def read_until(terminal, end):
    shown = b""
    while not shown.endswith(end):
        try:
            part = os.read(terminal, 1)
        except OSError:  # Linux's end of a terminal
            return shown
        if not part:
            return shown
        shown += part
    return shown


def test_chat_writes_no_prompt_into_a_pipe_and_takes_a_line_a_turn(folder):
    child = subprocess.run(
        [sys.executable, "-c", ECHO_CHAT, str(folder)], input="one\ntwo\n", capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (0, "['one']\n['two']\n\n")


# Closed streams. The shell closes them, as a user's would.


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("generate --model {folder} -p Hi -m 2", 0),
        ("generate --model {folder} -p Hi -m 2 --temp 0 --top-k 5", 0),  # with a notice
        ("chat --model {folder}", 0),
        ("convert --model {llama} -o {out}", 0),
        ("inspect {folder}", 0),
        ("--help", 0),
        ("generate --model ./nowhere -p x", 1),
        ("generate --dance", 2),
    ],
)
def test_a_closed_stream_is_no_error(folder, tmp_path, closed, command, code):
    command = command.format(folder=folder, llama=FIXTURES / "llama", out=tmp_path / "out")
    child = shell(f"{command} {closed}", stdin=subprocess.DEVNULL)
    out, err = child.communicate()
    assert child.returncode == code
    assert "Error" not in out + err
    assert "Traceback" not in out + err
    if "2>&-" in closed:
        assert err == ""
        assert "mlx-transmuter:" not in out


def shell(command, **options):
    program = ["sh", "-c", f'"$0" -m mlx_transmuter {command}', sys.executable]
    env = {**os.environ, "MLX_DISABLE_COMPILE": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        program, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env, **options}
    )


def test_a_notice_without_stderr_is_not_on_stdout(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    print_notice("nobody reads this")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "stream", "code"),
    [
        ("--help", "stdout", 141),
        ("inspect {folder}", "stdout", 141),
        ("generate --model ./nowhere -p x", "stderr", 1),
    ],
)
def test_a_pipe_without_a_reader_has_an_exit_code_and_no_message(folder, command, stream, code):
    reader, writer = os.pipe()
    os.close(reader)
    child = shell(command.format(folder=folder), **{stream: writer})
    os.close(writer)
    out, err = child.communicate()
    assert (child.returncode, out or "", err or "") == (code, "", "")


def test_a_full_disk_under_stdout_is_one_line(folder):
    child = shell(f"inspect {folder} >/dev/full")
    _, err = child.communicate()
    assert (child.returncode, err) == (1, "mlx-transmuter: no space left on the disk\n")


# Signals.

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from mlx_transmuter import cli
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "module", ["mlx_transmuter.cli.arguments", "argparse", "mlx_transmuter.cli.generate", "numpy", "mlx.core"]
)
def test_ctrl_c_while_modules_are_imported_is_exit_code_130(module):
    args = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "generate", "--model", "x", "-p", "x"]
    child = subprocess.run(args, capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (130, "", "")


def test_the_command_line_imports_next_to_nothing_before_it_minds_ctrl_c():
    code = "import sys; before = set(sys.modules); import mlx_transmuter.cli; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not set(out.split()) & {"argparse", "json", "mlx_transmuter.errors", "platform"}


def test_an_ignored_ctrl_c_stays_ignored(folder):
    child = shell(
        f"generate --model {folder} -p Hi -m 2", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    child.send_signal(signal.SIGINT)
    assert child.communicate()[1] == ""
    assert child.returncode == 0


def test_a_request_to_end_is_exit_code_143(folder):
    child = subprocess.Popen(
        [sys.executable, "-m", "mlx_transmuter", "chat", "--model", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "/help" in child.stderr.readline()
    child.send_signal(signal.SIGTERM)
    assert child.communicate() == ("", "")
    assert child.returncode == 143


# Generated text on a terminal.

HOSTILE_TEXT = "a\tb\n\x1b]0;title\x07\x1b[2J\x9b31m\rover\x08\u202eevil\u2066\u2028é\u200d\U0001f600"
ESCAPED_TEXT = "a\tb\r\n\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\rover\\x08\\u202eevil\\u2066\\u2028é\u200d\U0001f600"

# generate and chat in a child whose model writes that, each character a piece of its own.
HOSTILE_MODEL = """
import sys
from mlx_transmuter.cli import main
from mlx_transmuter.tasks import text

def stream(self, prompt, *, seed):
    for character in eval(sys.argv[1]):
        yield text.Piece(character)

text.TextGeneration.stream = stream
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", [["generate", "-p", "Hi", "--verbose", "False"], ["chat"]])
def test_control_characters_are_escaped_on_a_terminal(folder, command):
    args = [sys.executable, "-c", HOSTILE_MODEL, ascii(HOSTILE_TEXT), *command, "--model", str(folder)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, args, {**os.environ, "TERM": "dumb"})
    shown = b""
    if command == ["chat"]:
        shown += read_until(terminal, b"> ")
        os.write(terminal, b"Hi\r")
        shown += read_until(terminal, b"> ")
        os.write(terminal, b"/exit\r")
    shown += read_until(terminal, b"nothing")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ESCAPED_TEXT.encode() in shown


@pytest.mark.parametrize("command", [["generate", "-p", "Hi", "--verbose", "False"], ["chat"]])
def test_into_a_pipe_goes_the_text_as_it_is(folder, command):
    args = [sys.executable, "-c", HOSTILE_MODEL, ascii(HOSTILE_TEXT), *command, "--model", str(folder)]
    result = subprocess.run(args, input=b"Hi\n", capture_output=True, check=True)
    assert result.stdout.startswith(HOSTILE_TEXT.encode() + b"\n")
