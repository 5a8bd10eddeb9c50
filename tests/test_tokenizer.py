"""The tokenizer: ids and text as transformers has them, chat templates in a sandbox, text that streams whole."""

import json

import pytest
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlx_transmuter.tokenizer import Tokenizer, TokenizerError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Backend:
    """Every byte is a token, and some tokens end inside a character."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ["Ġhello", "lo", "ä½", "ðŁĺ", "ĢĢ", "Ġé"]:
        vocab[token] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def byte_fallback() -> Backend:
    """A SentencePiece vocabulary as Llama 2's: bytes as <0xE4>, and the first space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁hello", "é", "你", "▁▁", "\ufffd"]:
        vocab[token] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


TOKENIZERS = {
    "byte_level": Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "byte_fallback": Tokenizer(byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
}


def write(folder, backend: Backend, **files):
    """A model folder: tokenizer.json and the JSON or text `files` by their name, __ for the dot."""
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def pieces(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(id) for id in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150)
def test_streamed_text_is_the_text_of_the_whole(name, data):
    tokenizer = TOKENIZERS[name]
    # two ids past the vocabulary as well: a model's logits may be wider than its tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.one_of(st.characters(exclude_characters="\ufffd", codec="utf-8"), st.sampled_from("你é😀 ab"))))
@settings(max_examples=100)
def test_no_piece_of_valid_text_holds_half_a_character(name, text):
    tokenizer = TOKENIZERS[name]
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


GOLDEN = json.loads((FIXTURES / "llama" / "tokenizer_golden.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("sample", GOLDEN["samples"], ids=lambda sample: sample["text"][:12])
def test_a_fixtures_ids_and_text_are_those_of_transformers(sample):
    tokenizer = Tokenizer.from_folder(FIXTURES / "llama")
    assert tokenizer.encode(sample["text"]) == sample["ids"]
    assert tokenizer.encode(sample["text"], add_special_tokens=False) == sample["ids_without_special"]
    assert tokenizer.decode(sample["ids"]) == sample["decoded_without_special"]
    assert tokenizer.decode(sample["ids"], skip_special_tokens=False) == sample["decoded"]
    assert "".join(pieces(tokenizer, sample["ids"])) == sample["decoded_without_special"]


def test_a_fixtures_chat_is_that_of_transformers():
    tokenizer, chat = Tokenizer.from_folder(FIXTURES / "llama"), GOLDEN["chat"]
    assert tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=False) == chat["text"]
    assert tokenizer.apply_chat_template(chat["messages"]) == chat["prompt"]
    assert tokenizer.encode(chat["prompt"]) == chat["prompt_ids"]  # one bos, though the text has it and encode adds it


def test_a_character_is_printed_with_its_last_byte():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    assert pieces(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_byte_fallback_run_waits_for_the_token_after_it():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [
        tokenizer.token_id(token) for token in ["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b", "<0x41>", "<0xE2>"]
    ]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "", "😀b", "", "", "\ufffd\ufffd"]


def test_a_streams_flush_starts_a_new_sequence():
    stream = TOKENIZERS["byte_fallback"].stream()
    ids = TOKENIZERS["byte_fallback"].encode("hello a", add_special_tokens=False)
    first = "".join([*map(stream.push, ids), stream.flush()])
    assert "".join([*map(stream.push, ids), stream.flush()]) == first == "hello a"


def test_a_decoder_that_changes_earlier_text_waits_for_the_end():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "|": 2, "<pad>": 3}, unk_token="<pad>"))
    backend.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|")
    tokenizer = Tokenizer(backend)
    ids = [0, 0, 2, 1, 1, 2, 0, 3, 0]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_bos_is_never_doubled():
    tokenizer = TOKENIZERS["byte_fallback"]
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("<s>a").count(1) == 1
    assert tokenizer.encode("a", add_special_tokens=False).count(1) == 0
    assert tokenizer.encode("<s><s>a").count(1) == 2  # the second one stands in the text


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = byte_fallback()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a b a b a b a b")) == "a b a b a b a b"
    assert len(tokenizer.encode("ab")) == 4


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_eos_ids_of_all_files_are_joined(tmp_path):
    folder = write(
        tmp_path,
        byte_level(),
        tokenizer_config__json={"eos_token": {"__type": "AddedToken", "content": "</s>"}},
        generation_config__json={"eos_token_id": [7, 9]},
        genai_config__json={"model": {"eos_token_id": 9}},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == [7, 9, tokenizer.token_id("eos_token")]


def test_special_tokens_of_the_map_fill_what_the_config_lacks(tmp_path):
    folder = write(
        tmp_path,
        byte_level(),
        tokenizer_config__json={"eos_token": "</s>"},
        special_tokens_map__json={"eos_token": "<s>", "bos_token": "<s>"},
    )
    assert Tokenizer.from_folder(folder).special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}


def test_chatml(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(), tokenizer_config__json={"chat_template": CHATML}))
    chat = [{"role": "user", "content": "Hi <b> & you"}]
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(chat) == "<|im_start|>user\nHi <b> & you<|im_end|>\n<|im_start|>assistant\n"
    assert not tokenizer.apply_chat_template(chat, add_generation_prompt=False).endswith("assistant\n")


def test_template_files_win_and_named_ones_are_found(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]}
    folder = write(tmp_path, byte_level(), tokenizer_config__json=config, chat_template__jinja="new {{ mood }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template([], mood="kind") == "new kind"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "tools"


def test_what_templates_of_transformers_may_use():
    template = (
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ tools | tojson }}\n"
        "    {% generation %}\n"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        "{% endgeneration %}"
    )
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<s>"}, templates={"default": template})
    chat = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert tokenizer.apply_chat_template(chat, tools=[{"é": "<"}]) == '<s>4[{"é": "<"}]\none'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for %}",
        "{{ messages[0].role.nothing.more }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_clear_error(template):
    tokenizer = Tokenizer(byte_level(), templates={"default": template})
    with pytest.raises(TokenizerError, match="chat template that failed") as error:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_no_template_and_no_messages_are_errors():
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(TokenizerError, match="chat message 'hi'"):
        tokenizer.apply_chat_template(["hi"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"a":' * 100000),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [7]}'),
        ("tokenizer_config.json", b'{"add_bos_token": true, "tokenizer_class": 3, "chat_template": [{"name": "a"}]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {"content": "t", "lstrip": [1]}}}'),
        ("generation_config.json", b'{"eos_token_id": "two"}'),
        ("genai_config.json", b'{"model": {"eos_token_id": [true]}}'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b" " * (2**20 + 1)),
    ],
)
def test_a_malformed_file_is_named(tmp_path, name, content):
    write(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_text_and_ids_that_cannot_be():
    tokenizer = TOKENIZERS["byte_level"]
    for text in ["\udc80", None, b"x"]:
        with pytest.raises(TokenizerError, match="expected a str of valid Unicode"):
            tokenizer.encode(text)
    for ids in [[-1], [2**32], ["a"]]:
        with pytest.raises(TokenizerError, match="expected integers from 0 to 4294967295"):
            tokenizer.decode(ids)


def test_vocab_size_counts_to_the_largest_id():
    backend = byte_level()
    top = max(backend.get_vocab().values())
    backend.add_tokens([AddedToken("<extra>", special=False)])
    assert Tokenizer(backend).vocab_size == top + 2


SETUPS = {
    "plain": {},
    "llama": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"},
    "llama_without_bos": {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False,
    },
    "llama_with_eos": {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True,
    },
    "added": {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
        "added_tokens_decoder": {"900": {"content": "<|end|>", "special": False}, "901": {"content": "hello"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_ids_and_text_are_those_of_transformers(tmp_path, backend, setup):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, backend(), tokenizer_config__json={**SETUPS[setup], "chat_template": CHATML})
    name = SETUPS[setup].get("tokenizer_class", "PreTrainedTokenizerFast").removesuffix("Fast")
    theirs = getattr(transformers, name + "Fast").from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in ["hello", " a b  hello", "hello</s><|end|> é", "你😀", ""]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é\n"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
