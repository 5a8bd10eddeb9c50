"""The tokenizer: ids and text as transformers has them, chat templates in a sandbox, text that streams whole."""

import json
import time

import pytest
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlx_transmuter.tokenizer import Tokenizer, TokenizerError, template_environment
from mlx_transmuter.tokenizer.components import normalizer_growth
from mlx_transmuter.tokenizer.errors import library_errors

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


def byte_level_behind_sentencepiece() -> Backend:
    """Byte-level tokens whose file names the decoder of a SentencePiece vocabulary."""
    backend = byte_level()
    backend.decoder = byte_fallback().decoder
    return backend


TOKENIZERS = {
    "byte_level": Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "byte_fallback": Tokenizer(byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "cleaned_up": Tokenizer(byte_level(), {"eos_token": "</s>", "clean_up_tokenization_spaces": True}),
    "byte_level_behind_sentencepiece": Tokenizer(byte_level_behind_sentencepiece()),
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


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
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
    assert tokenizer.encode(chat["prompt"], add_special_tokens=False) == chat["prompt_ids"]


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


# What transformers 4.57.6 decodes with clean_up_tokenization_spaces=True, without the special tokens and with them.
CLEANED_UP = {
    "Hello , world . I do n't !": ("Hello, world. I don't!", "Hello, world. I don't!"),
    "it 's ' fine ' ? we 've , I 'm": ("it's'fine '? we've, I'm", "it's'fine '? we've, I'm"),
    "a  . b  ' s c n ' t d ' ' e": ("a . b's cn't d'' e", "a . b's cn't d'' e"),
    " . </s> , x</s> .": (". , x.", ". </s>, x</s>."),
}


@pytest.mark.parametrize("text", CLEANED_UP)
def test_spaces_are_cleaned_up_as_in_transformers(text):
    tokenizer, expected = TOKENIZERS["cleaned_up"], CLEANED_UP[text]
    ids = tokenizer.encode(text)
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)) == expected
    assert "".join(pieces(tokenizer, ids)) == expected[0]
    assert TOKENIZERS["byte_level"].decode(ids, skip_special_tokens=False) == text  # absent is False
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="</s>", clean_up_tokenization_spaces=True
    )
    assert (theirs.decode(ids, skip_special_tokens=True), theirs.decode(ids)) == expected


def test_a_space_waits_for_what_follows_it():
    tokenizer = TOKENIZERS["cleaned_up"]
    expected = ["a", "", "", " no", "", "", "", "n't", "", ".", ""]
    assert pieces(tokenizer, tokenizer.encode("a no n't .")) == expected


@given(text=st.text(st.sampled_from("  ''.,?!ntmsverex"), max_size=20))
@settings(max_examples=400)
def test_streamed_text_is_the_cleaned_up_text(text):
    tokenizer = TOKENIZERS["cleaned_up"]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def byte_level_with(**components) -> Backend:
    backend = byte_level()
    for name, component in components.items():
        setattr(backend, name, component)
    return backend


@pytest.mark.parametrize(
    "components",
    [
        {"decoder": byte_fallback().decoder},
        {"decoder": None},
        {"decoder": decoders.Metaspace(), "pre_tokenizer": None, "normalizer": normalizers.ByteLevel()},
        {"decoder": byte_fallback().decoder, "pre_tokenizer": None},
        {"decoder": byte_fallback().decoder, "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])},
    ],
)  # fmt: skip
def test_byte_level_tokens_are_decoded_to_bytes_whatever_the_decoder(components):
    text = "Hi é… 你😀</s>"
    ids = byte_level().encode(text).ids
    backend = byte_level_with(**components)
    assert "Ġ" in backend.decode(ids)  # what transformers prints, too
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "Hi é… 你😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_decoder_of_other_vocabularies_stays():
    for backend in (byte_fallback(), Backend(models.WordLevel({"Hi": 0, "Ġ": 1, "你": 2}, unk_token="Hi"))):
        decoder = backend.decoder and backend.decoder.__getstate__()
        Tokenizer(backend)
        assert (backend.decoder and backend.decoder.__getstate__()) == decoder
    assert Tokenizer(Backend(models.WordLevel({"Hi": 0, "you": 1}, unk_token="Hi"))).decode([0, 1]) == "Hi you"


def test_a_failure_inside_the_library_is_one_clear_error(tmp_path):
    """A regular expression whose search gives up panics in Rust, outside Exception; a word without unk is an Exception."""
    panicking = byte_level_with(pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    without_unk = Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="<unk>")))
    for tokenizer, text in [
        (Tokenizer.from_folder(write(tmp_path, panicking)), "a" * 40 + "b"),
        (without_unk, "b"),
    ]:
        with pytest.raises(TokenizerError, match="found a text on which the tokenizer fails: ") as error:
            tokenizer.encode(text)
        assert "\n" not in str(error.value)
    assert Tokenizer(panicking).encode("b") == [panicking.token_to_id("b")]


def test_added_tokens_on_which_the_normalizer_panics_name_the_file(tmp_path):
    backend = byte_level_with(normalizer=normalizers.Replace(Regex("(a+)+$"), "b"))
    config = {"added_tokens_decoder": {"900": {"content": "a" * 40 + "b", "normalized": True}}}
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json.*retry-limit"):
        Tokenizer.from_folder(write(tmp_path, backend, tokenizer_config__json=config))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_no_error_of_the_library(interruption):
    with pytest.raises(interruption), library_errors("a text: "):
        raise interruption


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (None, 1),
        (byte_fallback().normalizer, 2),
        (normalizers.Replace("ab", "xyz"), 2),
        (normalizers.Replace(Regex("x*"), "YY"), 3),
        (normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 3), 64),
        (normalizers.NFKC(), 18),
    ],
)
def test_the_growth_of_a_text_in_the_normalizer(normalizer, growth):
    assert normalizer_growth(byte_level_with(normalizer=normalizer) if normalizer else byte_level()) == growth
    for text in ["a" * 10, "ab" * 10, "\ufdfa", "b x" * 5]:
        assert normalizer is None or len(normalizer.normalize_str(text)) <= growth * len(text) + 2


def test_a_normalizer_that_would_make_too_much_of_a_text_is_refused():
    bomb = normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 10)
    tokenizer = Tokenizer(byte_level_with(normalizer=bomb))
    with pytest.raises(TokenizerError, match=r"1 characters, and a normalizer that makes up to 100,000,000,"):
        tokenizer.encode("a")
    assert tokenizer.encode("") == []


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


@pytest.mark.parametrize(
    ("text", "ids"),  # of transformers 4.57.6's PreTrainedTokenizerFast, add_special_tokens=True
    [
        ("a", [1, 259, 260]),
        ("<s>ab", [1, 1, 259, 260, 261]),
        ("<s><s>a", [1, 1, 1, 259, 260]),
    ],
)
def test_a_text_that_begins_with_bos_gets_another_as_in_transformers(text, ids):
    tokenizer = TOKENIZERS["byte_fallback"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


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


BOMBS = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "macro_output": "{% macro m() %}{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}{% endmacro %}{{ m() }}",
    "macro_calls": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "block_calls": "{% set n = namespace(d=0) %}{% block b %}{% if n.d < 60 %}{% set n.d = n.d + 1 %}{{ self.b() }}"
    "{{ self.b() }}{% set n.d = n.d - 1 %}{% endif %}{% endblock %}",
    "concatenation": "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "sum": "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "list": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "nested": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t }}",
    "nested_json": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = [n.t, n.t] %}{% endfor %}"
    "{{ n.t | tojson | length }}",
    "nested_text": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = [n.t, n.t] %}{% endfor %}"
    "{{ n.t | upper | length }}{{ n.t ~ '' }}",
    "product": "{{ ('a' * 10 ** 9) | length }}",
    "product_of_lists": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "percent": "{{ ('%999999999d' % 1) | length }}",
    "percent_star": "{{ ('%*d' % (999999999, 1)) | length }}",
    "format": "{{ '{:999999999}'.format(1) | length }}",
    "format_nested": "{{ '{:{}}'.format(1, 999999999) | length }}",
    "format_filter": "{{ '%999999999d' | format(1) | length }}",
    "center": "{{ 'a'.center(999999999) | length }}",
    "center_filter": "{{ 'a' | center(999999999) | length }}",
    "indent": "{{ 'a' | indent(999999999, first=true) | length }}",
    "indent_json": "{{ [1] | tojson(indent=999999999) | length }}",
    "batch": "{{ [1] | batch(999999999, 0) | list | length }}",
    "slice": "{{ [1] | slice(999999999) | list | length }}",
    "batch_named": "{{ [1] | batch(linecount=999999999, fill_with=0) | list | length }}",
    "round": "{{ 1 | round(999999999, method='floor') }}",
    "join_filter_separator": "{{ (['a'] * 99999) | join(messages[0].content) | length }}",
    "wordwrap": "{{ messages[0].content | wordwrap(1, wrapstring=messages[0].content, break_on_hyphens=false) }}",
    "replace": "{% set t = messages[0].content %}{{ t.replace('a', t) | length }}",
    "replace_filter": "{% set t = messages[0].content %}{{ t | replace('a', t) | length }}",
    "join": "{% set t = messages[0].content %}{{ t.join([t] * 99999) | length }}",
    "join_filter": "{% set t = messages[0].content %}{{ ([t] * 99999) | join | length }}",
    "copies": "{% set n = namespace(t=[]) %}{% set t = messages[0].content %}{% for i in range(99999) %}"
    "{% set n.t = n.t + [t[1:]] %}{% endfor %}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_rendering_is_bounded_in_time_and_size(bomb, monkeypatch):
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 0.2)
    tokenizer = Tokenizer(byte_level(), templates={"default": BOMBS[bomb]})
    start = time.monotonic()
    with pytest.raises(TokenizerError, match=r"chat template that failed: (it took|it made|'lipsum' is undefined)"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a" * 100_000}])
    assert time.monotonic() - start < 5


def test_the_bounds_of_a_rendering_let_long_chats_pass():
    template = (
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ (m.content | trim)[:2] + '%5d' % 1 %}"
        "{{ '{:>4}'.format(loop.index) ~ m.content.replace('a', 'bc').split('x')[-1] }}{{ 10 ** 3 % 7 * 2 }}"
        "{{ [1, m.role] | join(', ') | upper | replace('U', '12345678901') | indent(2) }}{{ m | tojson(indent=2) }}"
        "{{ 'at 1700000000000 %s' % 1700000000000 }}{{ '-' * 3 }}{% endfor %}{{ n.t | length }}{{ [1, 'é'] }}"
    )
    tokenizer = Tokenizer(byte_level(), templates={"default": template})
    chat = [{"role": "user", "content": "a long message " * 50}] * 2000
    text = tokenizer.apply_chat_template(chat)
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, indent: json.dumps(value, indent=indent)
    assert text == plain.from_string(template).render(messages=chat)


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
    "cleaned_up": {"eos_token": "</s>", "bos_token": "<s>", "clean_up_tokenization_spaces": True},
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_ids_and_text_are_those_of_transformers(tmp_path, backend, setup):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, backend(), tokenizer_config__json={**SETUPS[setup], "chat_template": CHATML})
    name = SETUPS[setup].get("tokenizer_class", "PreTrainedTokenizerFast").removesuffix("Fast")
    theirs = getattr(transformers, name + "Fast").from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in ["hello", " a b  hello", "hello</s><|end|> é", "你😀", "", "<s>ab", *CLEANED_UP]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é\n"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
