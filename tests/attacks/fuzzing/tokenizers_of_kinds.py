"""A small tokenizer of each model and of each kind of normalizer, splitter, post-processor and decoder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = [
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "<s>",
    "</s>",
    "▁",
    "▁hello",
    "he",
    "##llo",
    "Hello",
    "w",
    "ö",
    "r",
    "l",
    "d",
    " ",
    "a",
    "b",
    "é",
]


def byte_level() -> Tokenizer:
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("[0-9]+"), "0")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
        ]
    )
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def byte_fallback() -> Tokenizer:
    vocab = {text: i for i, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS[3:]])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    )
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(
        models.Unigram([(text, -float(i)) for i, text in enumerate(_WORDS)], unk_id=0, byte_fallback=False)
    )
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(
        models.WordPiece({text: i for i, text in enumerate(_WORDS)}, unk_token="[UNK]", max_input_chars_per_word=20)
    )
    made.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel({text: i for i, text in enumerate(_WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
    )
    made.post_processor = processors.RobertaProcessing(("</s>", 4), ("<s>", 3))
    made.decoder = decoders.CTC()
    made.enable_truncation(5, stride=1)
    made.enable_padding(length=8)
    return made


CONFIG = '{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "add_bos_token": true, "tokenizer_class": "LlamaTokenizer", "clean_up_tokenization_spaces": true, "model_max_length": 512, "added_tokens_decoder": {"400": {"content": "<x>", "special": true}}}'


def write_all(place: Path) -> None:
    """Writes each into a folder of its own."""
    for make in (byte_level, byte_fallback, unigram, word_piece, word_level):
        folder = place / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(make().to_str())
        (folder / "tokenizer_config.json").write_text(CONFIG)
