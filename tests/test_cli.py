"""The command line: what it prints, the exit codes, and that nothing is left half done."""

import io
import json
import os
import re
import sys

import pytest
from conftest import FIXTURES, answer, golden

from mlx_transmuter import api, cli
from mlx_transmuter.cli import generation_settings, model_loading
from mlx_transmuter.errors import TransmuterError, printable_text
from mlx_transmuter.hub import SourceError
from mlx_transmuter.notices import print_notice
from mlx_transmuter.tasks import text

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
        ("generate --max-token 5", "Did you mean --max-tokens[?]"),
        ("generate --max-token=5", "Did you mean --max-tokens[?]"),
        ("generate -max-tokens=5 -p x", "invalid int value: 'ax-tokens=5'"),
        ("generate -temp 1", "Did you mean --temp[?]"),
        ("convert --modle x", "Did you mean --model[?]"),
        ("--verison", "Did you mean --version[?]"),
        ("generate --model=", "--model: the name is empty"),
        ("generate --file= --model x", "--file: the name is empty"),
        ("generate --draft-model= --model x", "--draft-model: the name is empty"),
        ("chat --prompt-cache-file= --model x", "--prompt-cache-file: the name is empty"),
        ("convert --model x --mlx-path=", "--mlx-path.*: the name is empty"),
        ("convert --hf-path=", "--hf-path.*: the name is empty"),
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
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_an_empty_name_is_not_the_demo_model(run):
    for command in ("generate", "chat", "inspect"):
        assert run(command, "--model", "")[0] == 2
    code, _, err = run("inspect", "")
    assert code == 2
    assert "SOURCE: the name is empty" in err


def test_text_after_two_dashes_or_with_spaces_is_no_flag(folder):
    parse = cli.build_parser().parse_args
    assert parse(["generate", "-p", "--not a flag"]).prompt == "--not a flag"
    assert parse(["inspect", "--", "--folder"]).source == "--folder"


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
        (["--model", LLAMA, "-p", "x", "--extra-eos-token", "nosuchtoken"], "--extra-eos-token"),
        (["--model", str(FIXTURES / "llama_genai"), "-p", "a " * 300], "at most 256 tokens"),
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
    code, stdout, err = run("convert", "--hf-path", LLAMA, "--mlx-path", out)
    assert (code, stdout) == (0, f"{out}\n")
    number = r"\d(\.\d)?e-\d\d"
    proved = (
        rf"mlx-transmuter: proved: logits within {number} of their range \(tolerance {number}\); cache mode append\n"
    )
    assert re.fullmatch(proved, err)
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
        "positions    no limit; trained for 256",
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


# Names from files, in messages.


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("/модели/モデル　新/ação/q4.onnx", "/модели/モデル　新/ação/q4.onnx"),
        ("a\x1b[2Jb\x07\x9b31m", "a\\x1b[2Jb\\x07\\x9b31m"),
        ("two\nlines\tof it\r", "two lines of it "),
        ("gpj\u202eexe.\udcff", "gpj\\u202eexe.\\udcff"),
        ("می\u200cخواهم", "می\u200cخواهم"),
    ],
)
def test_text_from_a_file_is_printable(text, printed, capsys):
    assert printable_text(text) == printed
    print_notice(text)
    assert capsys.readouterr().err == f"mlx-transmuter: {printed}\n"
    error = TransmuterError(text, text, text, text, text)
    assert str(error) == f"{printed}: node {printed}: found {printed}; expected {printed}. To fix it: {printed}."
    assert (error.where, error.found, error.node) == (text, text, text)


def test_a_long_text_loses_its_middle():
    for long in ("a" + "x" * 100_000 + "z", "a" + "\x1b" * 100_000 + "z"):
        short = printable_text(long)
        assert len(short) == 500
        assert (short[0], short[-1]) == ("a", "z")
        assert "..." in short
        assert len(str(TransmuterError(long, long, long, long, long))) < 2600
    assert printable_text("x" * 500) == "x" * 500


def test_names_of_a_folder_are_printable_in_a_command(run, folder, tmp_path, monkeypatch):
    escape = "\x1b]0;owned\x07" + "n" * 100_000
    program = json.loads((folder / "program.json").read_text())
    program["meta"]["source"] = {"file": escape}
    program["meta"]["rewrites"] = [{"name": escape, "held": 3, "declined": {escape: 4}}]
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "program.json").write_text(json.dumps(program))
    code, out, err = run("inspect", tmp_path)
    assert (code, err) == (0, "")
    assert "\\x1b]0;owned\\x07nnn" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 500
    for error in (
        RuntimeError(escape),
        OSError(2, "No such file", escape),
        OSError(28, "full", escape),
        OSError(escape),
    ):

        def convert(*args, error=error, **options):
            raise error

        monkeypatch.setattr(api, "convert", convert)
        code, _, err = run("convert", "--model", "x")
        assert code == 1
        assert "\\x1b]0;owned" in err
        assert "\x1b" not in err
        assert len(err) < 700
    code, _, err = run("generate", "--prompt", "x", escape)
    assert code == 2
    assert "\x1b" not in err
    assert len(err) < 700
