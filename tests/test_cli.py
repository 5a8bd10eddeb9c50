"""The command line: what it prints, the exit codes, and that nothing is left half done."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import FIXTURES, answer, golden
from standin_hub import standin_hub

from mlx_transmuter import api, cli
from mlx_transmuter.cli import generation_settings, model_loading
from mlx_transmuter.hub import SourceError
from mlx_transmuter.tasks import text
from mlx_transmuter.tokenizer import Tokenizer

LLAMA = str(FIXTURES / "llama")


pytestmark = pytest.mark.usefixtures("cache")


def test_generate_answers_a_chat_and_says_what_it_took(run, folder):
    code, out, err = run("generate", "--model", folder, "--prompt", "Hi", "-m", 6)
    assert (code, err) == (0, "")
    head, body, stats = out.split("==========\n")
    assert head == ""
    assert body == answer(folder, [{"role": "user", "content": "Hi"}], max_new_tokens=6) + "\n"
    assert re.fullmatch(
        r"Prompt: \d+ tokens, [\d.]+ tokens/s\nGeneration: \d tokens, [\d.]+ tokens/s \(\w+\)\n"
        r"Compiled shapes: [1-9]\d*\nPeak memory: [\d.]+ [MG]B\n",
        stats,
    )


def test_the_prompt_comes_from_a_flag_a_file_or_stdin(run, folder, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("naïve café", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve café".encode())))
    quiet = ["generate", "--model", folder, "-m", 3, "--ignore-chat-template", "--verbose", "False"]
    wanted = answer(folder, "naïve café", max_new_tokens=3) + "\n"
    for given in (["--prompt", "naïve café"], ["-p", "-"], ["--prompt-file", tmp_path / "prompt.txt"]):
        assert run(*quiet, *given) == (0, wanted, "")


def test_flags_are_the_settings_they_name(folder):
    model, parse = api.load(folder), cli.build_parser().parse_args
    sampling = ["--temp", "0.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1"]
    given = generation_settings.generation_settings(
        model, parse(["chat", "-m", "9", *sampling, "--extra-eos-token", "<s>", "7"])
    )
    assert given.pop("eos_token_id") == [*text.eos_token_ids(model), 1, 7]
    assert given == {
        "max_new_tokens": 9,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
    }
    assert generation_settings.generation_settings(model, parse(["generate", "--temperature", "0"])) == {
        "do_sample": False
    }
    assert generation_settings.generation_settings(model, parse(["generate"])) == {}
    settings = generation_settings.generation_settings(
        model, parse(["generate", "--num-draft-tokens", "5", "--prompt-lookup", "6"])
    )
    assert settings == {"num_assistant_tokens": 5, "prompt_lookup_num_tokens": 6}


def test_every_flag_of_sampling_reaches_the_text(run, folder):
    sampled = ["generate", "--model", folder, "-p", "Hi", "-m", 5, "--verbose", "False", "--temp", 3, "--top-k", 0]
    outs = [run(*sampled, "--seed", seed)[1] for seed in (0, 0, 1)]
    assert outs[0] == outs[1] != outs[2]
    greedy = run("generate", "--model", folder, "-p", "Hi", "-m", 5, "--verbose", "False")[1]
    assert run(*sampled[:-1], 1, "--seed", 0)[1] == greedy
    system = ["--system-prompt", "Be brief."]
    assert (
        run("generate", "--model", folder, "-p", "Hi", "-m", 5, "--verbose", "False", *system)[1]
        == answer(
            folder, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], max_new_tokens=5
        )
        + "\n"
    )


def test_drafts_change_no_text_and_are_counted(run, folder):
    asked = ["generate", "--model", folder, "-p", "Hi", "-m", 9, "--temp", 0.01, "--seed", 3]
    plain = run(*asked)[1].split("==========\n")[1]
    for flags in (["--prompt-lookup", 4], ["--draft-model", folder, "--num-draft-tokens", 3]):
        code, out, err = run(*asked, *flags)
        assert (code, err) == (0, "")
        _, body, stats = out.split("==========\n")
        assert body == plain
        counts = re.search(r"Drafts: (\d+) of (\d+) accepted, ([\d.]+) tokens per pass\n", stats)
        accepted, proposed, tokens_per_pass = counts.groups()
        assert int(accepted) <= int(proposed)
        assert 1 <= float(tokens_per_pass) <= 4
    assert int(proposed) == int(accepted) > 0  # a model that drafts for itself


def test_what_has_no_effect_is_said(run, folder):
    flags = ["--temp", 0, "--top-k", 5, "--ignore-chat-template", "--system-prompt", "x"]
    code, _, err = run("generate", "--model", folder, "-p", "Hi", "-m", 2, *flags)
    assert code == 0
    assert "--top-k has no effect with --temp 0" in err
    assert "--system-prompt has no effect" in err


def test_without_a_model_the_demo_answers_its_prompt(run, monkeypatch):
    monkeypatch.setattr(model_loading, "DEMO_FOLDER", FIXTURES / "llama")
    code, out, err = run("generate", "-m", 2)
    assert code == 0
    assert "the demo model" in err
    assert "Generation: 2 tokens" in out


# Wrong arguments: exit code 2.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "required"),
        ("dance", "invalid choice"),
        ("generate --model x", "give --prompt"),
        ("generate --prompt a --prompt-file b", "not allowed|cannot read"),
        ("generate --prompt-file nowhere.txt", "cannot read nowhere.txt: No such file"),
        ("generate --temp -1", "0 or more"),
        ("generate --temp hot", "invalid float value"),
        ("generate --top-p 1.5", "not from 0 to 1"),
        ("generate --top-k 0.5", "invalid int value"),
        ("generate -m 0", "1 or more"),
        ("generate --seed x", "invalid int value"),
        ("generate --dtype fp61", "none of fp32 fp16"),
        ("generate --verbose maybe", "neither True nor False"),
        ("generate --chat-template-config {", "no JSON"),
        ("generate --chat-template-config []", "no JSON object"),
        ("generate --max-tok 5", "unrecognized arguments"),
        ("generate --kv-bits 3", "invalid choice"),
        ("generate --kv-bits 8 --kv-group-size 16", "invalid choice"),
        ("generate --num-draft-tokens 0", "1 or more"),
        ("generate --prompt-lookup some", "invalid int value"),
        ("convert", "--hf-path"),
        ("convert --model x --q-bits 4", "need -q"),
        ("convert --model x --quant-predicate mixed_3_6", "need -q"),
        ("convert --model x -q --q-bits 7", "bits 7; expected one of 2, 3, 4, 5, 6, 8"),
        ("convert --model x -q --q-group-size 16", "group_size 16"),
        ("convert --model x -q --quant-predicate mixed_36", 'use "mixed_3_6"'),
        ("convert --model x -q --q-bits 4 --quant-predicate mixed_3_6", "names its own bits"),
        ("generate --model x -q", "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_exit_code_2(run, args, message):
    code, out, err = run(*args.split())
    assert (code, out) == (2, "")
    assert re.search(message, err)


def test_stdin_that_is_no_text_is_exit_code_2(run, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    code, _, err = run("generate", "--model", folder, "--prompt", "-")
    assert code == 2
    assert "no UTF-8" in err


# Other errors: one line and exit code 1.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "./nowhere", "-p", "x"], "no such folder"),
        (["--model", LLAMA, "-p", ""], None),
        (["--model", LLAMA, "--file", "other.onnx", "-p", "x"], "no file 'other.onnx'"),
        (["--model", LLAMA, "-p", "a " * 300], "256 positions"),
        (["--model", LLAMA, "-p", "x", "--extra-eos-token", "nosuchtoken"], "--extra-eos-token"),
        (["--model", str(FIXTURES / "gpt2"), "-p", "x"], "no tokenizer.json"),
    ],
)
def test_an_error_is_one_line(run, args, message):
    code, _, err = run("generate", "--verbose", "False", "-m", 1, *args)
    lines = [line for line in err.splitlines() if "converted" not in line]
    if message is None:  # the chat template makes a prompt of an empty message
        assert (code, lines) == (0, [])
        return
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]
    assert lines[0].startswith("mlx-transmuter: ")


def test_errors_of_all_kinds_are_one_line(run, monkeypatch):
    for error, message, code in [
        (OSError(28, "No space left on device", "/x/y"), "no space left on the disk for /x/y", 1),
        (PermissionError(13, "Permission denied", "/x/y"), "/x/y: Permission denied", 1),
        (KeyError("surprise"), "KeyError: 'surprise' (MLX_TRANSMUTER_DEBUG=1 shows where)", 1),
        (RuntimeError("two\nlines"), "RuntimeError: two lines", 1),
        (SourceError("a", "two\nlines"), "mlx-transmuter: a: found two lines.\n", 1),
    ]:

        def convert(*args, error=error, **options):
            raise error

        monkeypatch.setattr(api, "convert", convert)
        found, out, err = run("convert", "--model", "x")
        assert (found, out, err.count("\n")) == (code, "", 1)
        assert message in err
        monkeypatch.setenv("MLX_TRANSMUTER_DEBUG", "1")
        with pytest.raises(type(error)):
            cli.main(["convert", "--model", "x"])
        monkeypatch.delenv("MLX_TRANSMUTER_DEBUG")


def test_another_machine_is_told_what_it_needs(run, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    code, _, err = run("inspect", "--model", "x")
    assert code == 1
    assert "native arm64 Python" in err


# Convert and inspect.


def test_convert_to_a_float_type(run, tmp_path):
    out = tmp_path / "out"
    assert run("convert", "--model", LLAMA, "-o", out, "--dtype", "float16", "-q", "--q-group-size", 32)[0] == 0
    facts = json.loads(run("inspect", out, "--json")[1])
    assert facts["cast"]["dtype"] == "float16"
    assert set(facts["parameters"]) == {"float16", "float32", "uint32"}
    assert "converted    to float16" in run("inspect", out)[1]
    assert "Then converted to float16" in (out / "README.md").read_text()
    assert run("generate", "--model", out, "-p", "Hi", "-m", 3)[0] == 0


def test_convert_keeps_activations_in_float_only_where_a_file_rounds_them(run, tmp_path):
    code, _, err = run("convert", "--model", LLAMA, "-o", tmp_path / "out", "--float-activations")
    assert code == 1
    assert "no activations rounded to 8 bits" in err


def test_convert_quantizes(run, tmp_path):
    code, stdout, err = run(
        "convert", "--hf-path", LLAMA, "--mlx-path", tmp_path / "out", "-q", "--q-bits", 8, "--q-group-size", 32
    )
    assert (code, stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "8 in 8 bits, groups of 32" in err
    facts = json.loads(run("inspect", tmp_path / "out", "--json")[1])
    assert facts["quantization"]["layers"] == {"8": 8}
    assert "8 in 8 bits" in run("inspect", tmp_path / "out")[1]
    assert run("generate", "--model", tmp_path / "out", "-p", "Hi", "-m", 3)[0] == 0


def test_convert_writes_a_folder_that_generates(run, tmp_path):
    out = tmp_path / "out"
    code, stdout, _ = run("convert", "--hf-path", LLAMA, "--mlx-path", out)
    assert (code, stdout) == (0, f"{out}\n")
    row = golden("llama")["rows"][0]
    assert text.generation(api.load(out))(row["prompt"]).tokens == row["tokens"]
    assert run("convert", "--model", LLAMA, "-o", out)[0] == 0  # an earlier conversion is replaced
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary/today.txt").write_text("dear")
    code, _, err = run("convert", "--model", LLAMA, "--out", tmp_path / "diary")
    assert code == 1
    assert "exists and holds something else" in err
    assert sorted(os.listdir(tmp_path)) == ["diary", "out"]


def test_ctrl_c_in_a_conversion_leaves_nothing(run, tmp_path, monkeypatch, cache):
    from mlx_transmuter.program import weights

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "save", interrupted)
    assert run("convert", "--model", LLAMA, "-o", tmp_path / "out")[0] == 130
    assert run("generate", "--model", LLAMA, "-p", "x")[0] == 130
    assert os.listdir(tmp_path) == ["cache"]
    assert os.listdir(cache / "converted") == []


def test_inspect_says_what_the_model_is(run, folder):
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    for line in [
        "cache mode   append",
        "positions    256",
        "1 input_ids int64 [batch_size, sequence_length]",
        "rewrites",
    ]:
        assert line in out
    code, out, _ = run("inspect", "--model", folder, "--json")
    found = json.loads(out)
    assert (code, found["cache_mode"], found["tokenizer"]) == (0, "append", {"tokens": 384, "chat_template": True})
    program = json.loads((folder / "program.json").read_text())
    assert sum(found["operators"].values()) == len(program["nodes"])
    assert found["rewrites"] == program["meta"]["rewrites"]


def test_inspect_says_how_an_unusual_decoder_runs(run, converted):
    assert "cache mode   grow, whole prompts\n" in run("inspect", converted("gpt2_reread"))[1]
    assert "cache mode   append, padding none\n" in run("inspect", converted("lfm2"))[1]
    out = run("inspect", converted("gpt2_merged"))[1]
    assert "cache mode   append\nbranch       cached\n" in out


def test_inspect_says_why_a_rewrite_did_not_hold(run, folder, tmp_path):
    program = json.loads((folder / "program.json").read_text())
    program["meta"]["rewrites"] = [{"name": "fuse", "held": 3, "declined": {"w has rank 2": 4}}]
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "program.json").write_text(json.dumps(program))
    out = run("inspect", "--model", tmp_path)[1]
    assert re.search(r"3 fuse\n +skipped 4: w has rank 2\n", out)


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


def test_a_conversation_that_grew_too_long_goes_on_after_a_reset(run, folder, monkeypatch):
    lines = iter(["long " * 200, "/reset", "Hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, err = run("chat", "--model", folder, "-m", 2)
    assert code == 0
    assert "256 positions" in err
    assert "/reset" in err
    assert out == answer(folder, [{"role": "user", "content": "Hi"}], max_new_tokens=2) + "\n"


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
